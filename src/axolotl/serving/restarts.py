"""Whether a managed server that ended is started again: counting, and the words when it is not. No process here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from axolotl.errors import EnvironmentFault, ServerError

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


@dataclass
class Restarts:
    """Restarts in a row without an answered request. Used under the lock of whoever owns it.

    limit: `vllm.max_restarts`. was_ready: a server that has never been ready has a reason that a restart does not cure.
    """

    limit: int
    count: int = 0
    was_ready: bool = False

    def served(self) -> None:
        self.was_ready, self.count = True, 0

    def take(self) -> bool:
        """Use one of them; False when none is left, or it was never ready."""
        if not self.was_ready or self.count >= self.limit:
            return False
        self.count += 1
        return True

    @property
    def pause_s(self) -> float:
        """The first restart is immediate; a server that fails at every start must not keep the machine busy."""
        return 0.0 if self.count <= 1 else min(FIRST_PAUSE_S * 2.0 ** (self.count - 2), MAX_PAUSE_S)

    def refusal(self, how: str, log_path: Path, log_tail: Sequence[str]) -> EnvironmentFault | ServerError:
        """Why it is not started again after it ended in the way `how`."""
        if self.was_ready:
            return lost(
                f"the managed server ended ({how}) and is not started again",
                f"vllm.max_restarts is {self.limit}, and none of them answered a request",
                log_tail,
            )
        return EnvironmentFault(
            f"the managed server ended ({how})",
            code="E-ENV-05",
            why=f"its last lines are above; all of them are in {log_path}",
            do="correct what they name and run train again",
            details=tuple(log_tail),
        )


def lost(what: str, why: str, log_tail: Sequence[str] = ()) -> ServerError:
    return ServerError(
        what,
        code="E-SRV-24",
        why=why,
        do="look at the server's log, correct what it names, then rerun train with --resume",
        details=tuple(log_tail),
    )
