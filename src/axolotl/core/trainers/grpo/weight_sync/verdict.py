"""What the server's log-probs of a version are held against, and the error that says they are another model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from axolotl.core.trainers.grpo.weight_sync.agreement import DISTINCT, distance, objection, stands_still
from axolotl.errors import SyncError
from axolotl.serving.wire import CANARY_VERSION

_OTHER_BASE = (
    "restart axolotl vllm-serve with this config: base model, revision and the number formats of both sides must agree"
)
_OTHER_POLICY = (
    "restart axolotl vllm-serve with this config; if it stays, lora_target_modules may hold what the engine ignores: "
    "try trl.vllm_lora_sync: false"
)


@dataclass(frozen=True)
class Expected:
    """What `version` must compute. tokens: those that are scored. logps: `[scored]`, as the trainer has them. others:
    what a server might compute with instead, by name. is_drawn: the server sampled the tokens itself."""

    version: int
    tokens: Sequence[int]
    logps: torch.Tensor
    others: Mapping[str, torch.Tensor]
    is_drawn: bool = False

    @property
    def name(self) -> str:
        return name_of(self.version)


def name_of(version: int) -> str:
    """As messages call it."""
    names = {0: "the base model", CANARY_VERSION: "the canary"}
    return names.get(version, f"policy version {version}")


def require(expected: Expected, served: torch.Tensor, *, tolerance: float, noise: float) -> None:
    """Raise `E-SYN-11` when `served` cannot be what was expected."""
    why = objection(served, expected.logps, expected.others, tolerance=tolerance, noise=noise)
    if why is None:
        return
    hidden = [name for name, logps in expected.others.items() if distance(expected.logps, logps) <= DISTINCT * noise]
    if hidden:
        why += f"; {' and '.join(hidden)} cannot be told from it (two right sides are {noise:.2g} nats apart)"
    tokens = f"the {len(served)} tokens that it sampled" if expected.is_drawn else f"{len(served)} fixed tokens"
    what = f"the server does not generate with {expected.name}: its log-probs of {tokens} are another model's"
    raise _failure(what, why, expected, {"server": served}, _OTHER_BASE if expected.version == 0 else _OTHER_POLICY)


def require_moved(
    expected: Expected, served: torch.Tensor, before: Expected, served_before: torch.Tensor, *, noise: float
) -> None:
    """Raise `E-SYN-11` when the trainer's log-probs moved since `before`, and the server's stood still."""
    why = stands_still(served, served_before, expected.logps, before.logps, noise=noise)
    if why is not None:
        columns = {"server": served, f"server with {before.name}": served_before}
        raise _failure(
            f"{expected.name} changed nothing in the server: it still computes what it did with {before.name}",
            why,
            expected,
            columns,
            "restart axolotl vllm-serve; if it computes in half precision, small changes may be lost where it merges "
            "the adapter: set vllm.dtype: float32",
        )


def _failure(what: str, why: str, expected: Expected, served: Mapping[str, torch.Tensor], do: str) -> SyncError:
    """With the numbers that were compared, a token a line. served: what the server computed, by the columns' names."""
    columns = {**served, expected.name: expected.logps, **expected.others}
    table = [
        f"log-prob of token {token}: " + ", ".join(f"{name} {logps[i].item():.4f}" for name, logps in columns.items())
        for i, token in enumerate(expected.tokens)
    ]
    return SyncError(what, code="E-SYN-11", why=why, do=do, details=tuple(table))
