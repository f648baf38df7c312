"""Training runs that are killed at moments drawn from a seed, and at every failpoint, and each resumed to its end.

    survive ─► warm server, one for all runs ─► calm run a mode: the oracle
            ─► for each kill: train ─► SIGKILL ─► --resume (one in four is killed again) ─► the same end?

A kill is survived when the run ends with the story of the calm one in its journal, and with its weights and moments to
the byte. The server is the real one on a tiny random model: the seeds of its completions follow from the step.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from axolotl.core.run.checkpoints.manifest import verify
from axolotl.core.run.checkpoints.store import checkpoints, step_of, temporaries
from axolotl.core.run.journal import read_journal, standing
from axolotl.failpoints import POINTS, VARIABLE
from tests.support.cli import free_port
from tests.support.disturbed import wait_until
from tests.support.forked import Forked, forked
from tests.support.project import make_project, metrics

STEPS, PROMPTS, SAMPLES = 8, 2, 4
SAVE_STEPS = 2
NUM_QUESTIONS = 24
CHANCE_OF_ANOTHER = 0.25

MODES: dict[str, dict[str, Any]] = {
    "in turn": {},
    "async": {
        "trl__async_prefetch": True,
        "trl__prefetch_depth": 2,
        "trl__replay_buffer_size": 8,
        "trl__reroll_start_fraction": 0.3,
    },
    # Every second checkpoint is in the middle of a rollout, and the last rollout is cut off by the end of the run.
    "iterated": {
        "trl__async_prefetch": True,
        "trl__streaming_partial_batch": True,
        "trl__replay_buffer_size": 8,
        "trl__num_iterations": 3,
    },
}

# Most groups have a success and a failure, some have failures only: these are replaced, and tried again.
REWARD = """

def many_vowels(completions, **kwargs):
    return [float(reward >= 4) for reward in vowels(completions)]
"""

# How often a run passes a point at least; those below are passed for every rollout, every other one in each step.
_PASSINGS = {
    "cfg.loaded": 1,
    "srv.handshake": 1,
    "srv.canary": 1,
    "end": 1,
    "ckpt.before_prune": 2,
    "ckpt.after_prune": 2,
}
_OF_A_ROLLOUT = ("sync.", "gen.", "rwd.")


@dataclass(frozen=True)
class Kill:
    """Where a run of `mode` is killed: at the passing `nth` of a failpoint, or after a share of the time it takes."""

    mode: str
    share: float = 0.0
    point: str = ""
    nth: int = 1

    def __str__(self) -> str:
        where = f"at {self.point}, time {self.nth}" if self.point else f"after {self.share:.0%} of its time"
        return f"{self.mode}, {where}"


@dataclass
class Result:
    """problems: what went wrong, one text a kill that was not survived."""

    survived: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.survived + len(self.problems)


def random_kills(count: int, draw: random.Random) -> list[Kill]:
    names = sorted(MODES)
    return [Kill(names[number % len(names)], share=draw.random()) for number in range(count)]


def failpoint_kills(draw: random.Random, points: Sequence[str] = tuple(sorted(POINTS))) -> list[Kill]:
    """Every point in every mode."""
    return [
        Kill(mode, point=name, nth=draw.randint(1, _passings(name, mode))) for mode in sorted(MODES) for name in points
    ]


def _passings(point: str, mode: str) -> int:
    if point in _PASSINGS:
        return _PASSINGS[point]
    if point.startswith("ckpt."):
        return STEPS // SAVE_STEPS
    return math.ceil(STEPS / _iterations(mode)) if point.startswith(_OF_A_ROLLOUT) else STEPS - 1


def _iterations(mode: str) -> int:
    return int(MODES[mode].get("trl__num_iterations", 1))


@dataclass(frozen=True)
class Ground:
    """Where runs live, one directory each, and the server that all of them ask."""

    directory: Path
    model: Path
    port: int

    def project(self, name: str, mode: str, **overrides: Any) -> Path:
        directory = self.directory / name
        settings: dict[str, Any] = {
            "trl__use_vllm": True,
            "trl__vllm_lora_sync": True,
            "trl__use_data_producer": True,
            "vllm": {
                "port": self.port,
                "managed": False,
                "engine": "transformers",
                "sync_dir": str(self.directory / "sync"),
            },
            "gradient_accumulation_steps": PROMPTS,
            "trl__num_generations": SAMPLES,
            "trl__reward_funcs": ["project_rewards.many_vowels"],
            "num_questions": NUM_QUESTIONS,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": SAVE_STEPS,
            "save_total_limit": 2,
        }
        make_project(directory, self.model, **{**settings, **MODES[mode], **overrides})
        with (directory / "project_rewards.py").open("a") as file:
            file.write(REWARD)
        return directory


@contextmanager
def ground(directory: Path, model: Path) -> Iterator[Ground]:
    """A server that is ready, until the block ends."""
    place = Ground(directory, model, free_port())
    with forked(place.project("server", "async"), "vllm-serve", "config.yaml") as server:
        wait_until(lambda: _answers(place.port, server), "a server that is ready")
        yield place
        server.terminate()
        assert server.wait(30) == 0, server.output


def _answers(port: int, server: Forked) -> bool:
    assert server.wait(0) is None, server.output
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class Calm:
    """A run that nobody disturbed. seconds: how long it took."""

    directory: Path
    seconds: float

    @property
    def story(self) -> list[dict[str, Any]]:
        return story(self.directory / "out")


def calm_runs(place: Ground) -> dict[str, Calm]:
    """One of each mode."""
    return {mode: _calm_run(place, mode) for mode in MODES}


def _calm_run(place: Ground, mode: str) -> Calm:
    directory = place.project(f"calm-{mode.replace(' ', '-')}", mode)
    started = time.monotonic()
    _finish(directory, ())
    calm = Calm(directory, time.monotonic() - started)
    assert_not_in_vain(calm, mode)
    return calm


def run(num_random: int, seed: int, directory: Path, model: Path) -> Result:
    """`num_random` kills at any time, and one at each failpoint in each mode; says how every one went."""
    draw = random.Random(seed)
    kills = [*random_kills(num_random, draw), *failpoint_kills(draw)]
    with ground(directory, model) as place:
        return survive(kills, place, calm_runs(place), draw, lambda line: print(line, flush=True))


def survive(
    kills: Sequence[Kill],
    place: Ground,
    calm: Mapping[str, Calm],
    draw: random.Random,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Every kill in a run of its own. calm: by mode."""
    result = Result()
    for number, kill in enumerate(kills, 1):
        directory = place.project(f"killed-{number}", kill.mode)
        try:
            resumed = _run_killed(directory, kill, calm[kill.mode].seconds, draw)
            assert_same_end(directory / "out", calm[kill.mode].directory / "out")
        except AssertionError as problem:
            result.problems.append(f"{kill}: {problem}\n{(directory / 'output.log').read_text()[-3000:]}")
            say(f"trainer {number}: {result.problems[-1]}")
            continue
        result.survived += 1
        shutil.rmtree(directory)
        say(f"trainer {number}: {kill}: survived, {resumed}")
    # One for the last run, and one that the next claim would have removed.
    left = [path.name for path in (place.directory / "sync" / "adapters").iterdir()]
    if len(left) > 2:
        result.problems.append(f"adapters of {len(left)} runs are left")
    return result


def _run_killed(directory: Path, kill: Kill, seconds: float, draw: random.Random) -> str:
    """Start a run, kill it there, and resume it until it has finished; says how that went."""
    if kill.point:
        with forked(directory, "train", "config.yaml", **{VARIABLE: f"{kill.point}=kill@{kill.nth}"}) as run:
            assert run.wait() == -signal.SIGKILL, "the run did not come to this point"
        num_kills = 1
    else:
        num_kills = int(_kill_after(directory, (), kill.share * seconds))
    while draw.random() < CHANCE_OF_ANOTHER:
        num_kills += _kill_after(directory, _flags(directory), draw.random() * seconds / 2)
    began = max((step_of(path) for path in checkpoints(directory / "out")), default=0)
    _finish(directory, _flags(directory))
    return f"killed {num_kills} times, at last resumed from step {began}"


def _kill_after(directory: Path, flags: Sequence[str], seconds: float) -> bool:
    """Whether the run still ran; one that was quicker has done what it should."""
    with forked(directory, "train", "config.yaml", *flags) as run:
        code = run.wait(seconds)
        run.kill()
        assert code in (None, 0) or _has_nothing_to_resume(run, code), f"exit code {code}"
    return code is None


def _finish(directory: Path, flags: Sequence[str]) -> None:
    with forked(directory, "train", "config.yaml", *flags) as run:
        code = run.wait()
    if _has_nothing_to_resume(run, code):
        return _finish(directory, ("--overwrite",))
    assert code == 0, f"{' '.join(flags) or 'train'}: exit code {code}"


def _flags(directory: Path) -> tuple[str, ...]:
    """Killed before its first checkpoint, a run starts over; `--resume` says whether half of one can be used."""
    out = directory / "out"
    return ("--resume",) if checkpoints(out) or temporaries(out) else ("--overwrite",)


def _has_nothing_to_resume(run: Forked, code: int | None) -> bool:
    return code == 2 and "--resume: there is no checkpoint" in run.output


def story(out: Path) -> list[dict[str, Any]]:
    """Prompts, versions, completions, rewards, loss and weights of each step that the final weights are made of."""
    return standing(read_journal(out / "journal.jsonl"))


def assert_same_end(out: Path, calm: Path) -> None:
    """The run in `out` is the one in `calm`, and left nothing half done."""
    ours, theirs = story(out), story(calm)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other, f"step {mine['step']} is {mine}\nand without kills {other}"
    assert [line["step"] for line in metrics(out)] == list(range(1, STEPS + 1)), "a step is missing in the metrics"
    last = f"checkpoint-{STEPS}"
    for name in ("adapter_model.safetensors", f"{last}/adapter_model.safetensors", f"{last}/optimizer.pt"):
        assert (out / name).read_bytes() == (calm / name).read_bytes(), f"{name} is another one"
    assert_books_balance(out)
    assert _ledger(out) == _ledger(calm)
    assert temporaries(out) == []
    assert all(verify(checkpoint) == [] for checkpoint in checkpoints(out))


def assert_books_balance(out: Path) -> None:
    """Every completion that was asked for is in one class, in the journal and in the checkpoint."""
    ledger = _ledger(out)
    asked, drawn = ledger.pop("ordered"), ledger.pop("drawn")
    assert drawn == ledger["replayed"]
    assert sum(ledger.values()) == asked + drawn
    for name, count in ledger.items():
        assert sum(line["ledger"].get(name, 0) for line in story(out)) == count, f"{name} in journal and checkpoint"


def _ledger(out: Path) -> dict[str, int]:
    path = out / f"checkpoint-{STEPS}" / "rollouts" / "rank-0" / "ledger.json"
    return cast(dict[str, int], json.loads(path.read_text()))


def assert_not_in_vain(calm: Calm, mode: str) -> None:
    """The oracle itself: no prompt twice in an epoch but as a second try, and what the mode is for has happened."""
    begins = [line for line in calm.story if (line["step"] - 1) % _iterations(mode) == 0]
    assert _ledger(calm.directory / "out")["ordered"] == len(begins) * PROMPTS * SAMPLES
    groups = [(line["epoch"], group) for line in begins for group in line["groups"]]
    first = [(epoch, group["row"]) for epoch, group in groups if group["origin"] == "fresh" and not group["reroll"]]
    assert len(first) == len(set(first)), "a prompt was doubled"
    ages = {line["step"] - version for line in calm.story for group in line["groups"] for version in group["versions"]}
    if mode == "async":
        assert max(ages) >= 2 and any(group["reroll"] for _, group in groups)
    if mode != "in turn":
        assert any(group["origin"] != "fresh" for _, group in groups), "nothing was replayed"
    else:
        assert ages == {0} and len(first) == STEPS * PROMPTS, "a prompt was lost"
