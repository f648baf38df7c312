"""Draw the mean reward of each step from a run's metrics.jsonl.

`python plot.py output/metrics.jsonl output/reward.png` writes the picture again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def read_rewards(metrics: Path) -> list[tuple[int, float]]:
    """(step, mean reward) of every line that has a reward."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(record["step"], record["reward"]) for record in records if "reward" in record]


def draw(metrics: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, rewards = zip(*read_rewards(metrics), strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, rewards, marker="o", markersize=4)
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(-0.02, 1.02), title="Share of right completions")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
