"""The replay buffer in a checkpoint: what is drawn after a resume is what would have been drawn without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from axolotl.core.trainers.grpo.rollout.group_files import Cut, pack_groups, read_state, unpack_groups, write_state
from axolotl.core.trainers.grpo.rollout.replay import ReplayBuffer, ReplayGroup, ReplaySpec
from axolotl.core.trainers.grpo.types import PromptRow

_NAME = "replay"


def save_replay(buffer: ReplayBuffer, directory: Path) -> None:
    """`replay.json` and `replay.safetensors` in `directory`, which is this rank's and exists."""
    groups = buffer.groups
    records, tensors = pack_groups([group.group for group in groups])
    scores = [
        {
            "step": group.step,
            "signal": group.signal,
            "functions": len(group.rewards[0]),
            "policy_logps": None if group.policy_logps is None else [len(row) for row in group.policy_logps],
        }
        for group in groups
    ]
    rewards = [value for group in groups for row in group.rewards for value in row]
    logps = [value for group in groups for row in group.policy_logps or () for value in row]
    tensors["rewards"] = torch.tensor(rewards, dtype=torch.float64)
    tensors["policy_logps"] = torch.tensor(logps, dtype=torch.float64)
    write_state(directory, _NAME, {"groups": records, "scores": scores}, tensors)


def load_replay(directory: Path, spec: ReplaySpec, rows: Sequence[PromptRow]) -> ReplayBuffer:
    """The buffer again, cut down to `spec.capacity` when that is smaller now. rows: see `unpack_groups`."""
    record, tensors = read_state(directory, _NAME)
    groups = unpack_groups(record["groups"], tensors, rows)
    rewards, logps = Cut(tensors["rewards"]), Cut(tensors["policy_logps"])
    restored = [
        ReplayGroup(
            group=group,
            rewards=tuple(rewards.next(score["functions"]) for _ in group.completions),
            step=score["step"],
            signal=score["signal"],
            policy_logps=None
            if score["policy_logps"] is None
            else tuple(logps.next(length) for length in score["policy_logps"]),
        )
        for group, score in zip(groups, record["scores"], strict=True)
    ]
    return ReplayBuffer(spec, restored)
