"""The whole quickstart: get the model and the questions, measure, train, measure again, draw the reward.

`make quickstart` installs what it needs and runs this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import make_data
import plot
import prepare_model
from evaluate import heldout_accuracy

HERE = Path(__file__).resolve().parent
OUTPUT = HERE / "output"


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def train() -> None:
    """The job itself, as a person would type it. Ends this program with its exit code when it fails."""
    command = [str(Path(sys.executable).with_name("axolotl")), "train", "config.yaml", "--overwrite"]
    say(f"axolotl {' '.join(command[1:])}    (in {HERE.name}/)")
    done = subprocess.run(command, cwd=HERE, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def main() -> None:
    started = time.monotonic()
    say("model and questions")
    print(prepare_model.prepare())
    print(*make_data.write(), sep="\n")

    say("accuracy on held-out questions before training")
    before = heldout_accuracy()
    print(f"{before:.0%}")

    train()

    say("accuracy on held-out questions after training")
    after = heldout_accuracy(OUTPUT)
    print(f"{after:.0%}")
    plot.draw(OUTPUT / "metrics.jsonl", OUTPUT / "reward.png")

    say(f"done in {(time.monotonic() - started) / 60:.1f} minutes")
    print(f"held-out accuracy   {before:.0%} -> {after:.0%}")
    print(f"adapter             {OUTPUT / 'adapter_model.safetensors'}")
    print(f"metrics             {OUTPUT / 'metrics.jsonl'}")
    print(f"reward plot         {OUTPUT / 'reward.png'}")


if __name__ == "__main__":
    main()
