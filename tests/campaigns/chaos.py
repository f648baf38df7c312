"""`make chaos`: a training run whose server is killed or stopped again and again, at moments drawn from a seed.

A fault is survived when the run has finished another optimizer step after it. In the end the run must have finished
all its steps, and trained on the very prompts and completions of a run that nobody disturbed. Then training runs are
killed themselves, by `trainer_chaos.py`. The last line counts:

    survived 20 of 20 (transformers), 5 of 5 (vllm), 111 of 111 (trainer)
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.campaigns import trainer_chaos
from tests.support.disturbed import Disturbed, assert_equal_runs, disturbed, disturbed_project
from tests.support.tiny_model import make_tiny_model

EngineName = Literal["transformers", "vllm"]
Kind = Literal["kill server", "kill engine", "stop server", "stop engine"]
Moment = Literal["generation", "training", "push", "load"]

MOMENTS: tuple[Moment, ...] = ("generation", "generation", "training", "push", "load")
KINDS: dict[EngineName, tuple[Kind, ...]] = {
    "transformers": ("kill server", "kill server", "stop server"),
    "vllm": ("kill server", "kill engine", "stop server", "stop engine"),
}
# From a fault to the end of the next step: noticing that it hangs, starting, loading, and the step.
RECOVERY_S: dict[EngineName, float] = {"transformers": 180.0, "vllm": 420.0}
# The longest time without progress that counts as slow; vLLM says nothing for a while when it starts.
TIMEOUT_S: dict[EngineName, int] = {"transformers": 25, "vllm": 60}
STEPS_A_FAULT = 2


@dataclass
class Result:
    """survived: faults after which the run went on, 0 when in the end it was not the run it should have been."""

    engine: EngineName
    faults: int
    survived: int = 0
    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    @property
    def report(self) -> str:
        return "\n".join(self.lines)


def survive(engine: EngineName, faults: int, *, seed: int, directory: Path, model: Path) -> Result:
    """One run with `faults` faults in a row, and one without."""
    result = Result(engine, faults)
    draw = random.Random(seed)
    steps = STEPS_A_FAULT * faults + 2
    options: dict[str, Any] = {"vllm__engine": engine, "trl__vllm_server_timeout": TIMEOUT_S[engine]}
    if engine == "vllm":
        options["vllm__max_model_len"] = 384
    calm, wild = directory / "calm", directory / "wild"
    for place in (calm, wild):
        disturbed_project(place, model, steps, num_questions=4 * steps, **options)
    with disturbed(calm) as run:
        assert run.train.wait(60.0 * steps) == 0, run.train.output
    done = 0
    with disturbed(wild) as run:
        try:
            for number in range(faults):
                kind, moment = draw.choice(KINDS[engine]), draw.choice(MOMENTS)
                at_step = STEPS_A_FAULT * number + 1
                run.wait_until(lambda at_step=at_step: run.num_scored >= at_step, f"step {at_step}", RECOVERY_S[engine])
                inflict(run, kind, moment)
                before = run.num_scored
                run.wait_until(
                    lambda before=before: run.num_scored > before, f"a step after {kind}", RECOVERY_S[engine]
                )
                done += 1
                result.say(f"{engine} {number + 1}: {kind} during {moment}, step {before + 1}: survived")
            code = run.train.wait(60.0 * steps)
            assert code == 0, f"exit code {code}\n{run.train.output}"
        except AssertionError as problem:
            result.survived = done
            result.say(f"{engine}: {problem}")
            return result
    try:
        assert_equal_runs(wild, calm)
    except AssertionError as problem:
        result.say(f"{engine}: the run is not what it is without faults: {problem}")
        return result
    result.survived = done
    return result


def inflict(run: Disturbed, kind: Kind, moment: Moment) -> None:
    """Wait for the moment, then do it to whoever is there."""
    if moment == "load":
        # The server that is hit is the one that is being started in place of another.
        first = run.wait_until(run.server, "a server")
        os.kill(first.pid, signal.SIGKILL)
        run.wait_until(lambda: run.server() not in (None, first) and run.is_loading(), "a server that loads")
    elif moment == "generation":
        run.wait_until(run.is_generating, "generation")
    elif moment == "push":
        before = _pushed(run)
        run.wait_until(lambda: _pushed(run) - before, "a push")
    pid = _victim(run, kind)
    os.kill(pid, signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP)


def _victim(run: Disturbed, kind: Kind) -> int:
    """The pid to hit; the server while its engine has no process yet."""
    if kind.endswith("engine") and (child := run.engine_child()) is not None:
        return int(child.pid)
    server = run.wait_until(run.server, "a server")
    return int(server.pid)


def _pushed(run: Disturbed) -> set[str]:
    """Versions that were written, or are being written."""
    return {item.name for item in (run.directory / "sync" / "adapters").glob("*/*")}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transformers", type=int, default=20, help="faults with the transformers engine")
    parser.add_argument("--vllm", type=int, default=5, help="faults with vLLM")
    parser.add_argument(
        "--trainer", type=int, default=30, help="kills of the trainer at random, besides each failpoint; 0 for neither"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    wanted: list[tuple[EngineName, int]] = [("transformers", options.transformers), ("vllm", options.vllm)]
    counts: list[tuple[str, int, int]] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        model = make_tiny_model(Path(scratch) / "model")
        for engine, faults in wanted:
            if faults:
                place = Path(scratch) / engine
                result = survive(engine, faults, seed=options.seed, directory=place, model=model)
                counts.append((engine, result.survived, result.faults))
        if options.trainer:
            survived = trainer_chaos.run(options.trainer, options.seed, Path(scratch) / "trainer", model)
            counts.append(("trainer", survived.survived, survived.kills))
    print("survived " + ", ".join(f"{survived} of {faults} ({name})" for name, survived, faults in counts))
    return 0 if all(survived == faults for _, survived, faults in counts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
