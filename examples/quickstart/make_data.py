"""Write the quickstart's questions: additions of two numbers from 1 to 20, some of them held out for the final test.

`python make_data.py` writes data/train.jsonl and data/heldout.jsonl beside this file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent / "data"
NUM_HELDOUT_SUMS = 30


def questions(pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """One row a pair, and one for the pair the other way round."""
    ordered = sorted({pair for a, b in pairs for pair in ((a, b), (b, a))})
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in ordered]


def split(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows. Where 3 + 8 is held out, 8 + 3 is too."""
    sums = [(a, b) for a in range(1, 21) for b in range(a, 21)]
    random.Random(seed).shuffle(sums)
    return questions(sums[NUM_HELDOUT_SUMS:]), questions(sums[:NUM_HELDOUT_SUMS])


def write(directory: Path = DIRECTORY) -> tuple[Path, Path]:
    """The two files, the same on every call."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "train.jsonl", directory / "heldout.jsonl"
    for path, rows in zip(paths, split(), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


if __name__ == "__main__":
    print(*write(), sep="\n")
