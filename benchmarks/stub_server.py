"""A generation server without a model: the real app, and an engine that sleeps instead of computing.

    python benchmarks/stub_server.py SYNC_DIR      prints its address; ends when its standard input does

The groups of a request finish one after the other, evenly over the seconds of `generation_kwargs: {delay_s: ...}`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from axolotl.serving.wire import Group, Sampling  # noqa: E402
from tests.fakes.engine import FakeEngine  # noqa: E402
from tests.support.live_server import live_server  # noqa: E402

DELAY = "delay_s"


class SleepingEngine(FakeEngine):
    """Tokens follow from the seeds. num_modules: what it says of every adapter."""

    max_model_len = 1024

    def __init__(self, num_modules: int) -> None:
        super().__init__()
        self.num_modules = num_modules

    def check_sampling(self, sampling: Sampling) -> None: ...

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[Sequence[int]], adapter_version: int
    ) -> AsyncIterator[Group]:
        pause = float(sampling.extra.get(DELAY, 0.0)) / len(prompts)
        began = asyncio.get_running_loop().time()
        for index, row in enumerate(seeds):
            # By the clock, so that late wake-ups do not add up.
            await asyncio.sleep(began + (index + 1) * pause - asyncio.get_running_loop().time())
            self.work += len(row) * sampling.max_tokens
            completions = [self._completion(seed, sampling, adapter_version) for seed in row]
            yield Group(index=index, completions=completions)


@contextmanager
def stub_server(sync_dir: Path, num_modules: int) -> Iterator[str]:
    """One in a process of its own; gives its address."""
    with Popen([sys.executable, __file__, str(sync_dir), str(num_modules)], stdin=PIPE, stdout=PIPE, text=True) as stub:
        assert stub.stdin is not None and stub.stdout is not None
        try:
            yield stub.stdout.readline().strip()
        finally:
            stub.stdin.close()


def main(sync_dir: str, num_modules: str) -> None:
    async def engine() -> SleepingEngine:
        return SleepingEngine(int(num_modules))

    with live_server(Path(sync_dir), engine) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
