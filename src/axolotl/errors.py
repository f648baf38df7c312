"""What a run can end with: one exception per kind of fault, its exit code, and the four-line report.

    AxolotlError
    ├── InternalError        1   a broken invariant of ours
    ├── ConfigError          2   the YAML, a flag, a combination of options
    ├── EnvironmentFault     3   a package, a device, a port, a permission
    ├── DataError            4   a data set, a column, a row
    ├── RewardError          5   the user's reward code
    ├── ServerError          6   the generation server
    ├── SyncError            7   an adapter that did not arrive or had no effect
    ├── NumericError         8   NaN or infinity beyond what is allowed
    ├── StorageError         9   no space, a checkpoint that does not verify
    ├── MemoryFault         10   out of memory
    ├── PeerError           11   another rank failed
    ├── StallError          12   our own watchdog
    └── Interrupted    130/143   SIGINT or SIGTERM, after the save

Raise the kind that names who has to act. The command line prints `report()` as the last thing on stderr and exits
with `exit_code`; every other exception is a bug of ours and exits 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Report:
    """The four lines a user reads when a run ends early. Empty lines are left out."""

    code: str
    what: str
    why: str = ""
    saved: str = ""
    do: str = ""

    def __str__(self) -> str:
        lines = [f"ERROR {self.code}  {self.what}"]
        for label, text in (("why", self.why), ("saved", self.saved), ("do", self.do)):
            if text:
                lines.append(f"  {label:<6} {text}")
        return "\n".join(lines)


class AxolotlError(Exception):
    """Base of every fault we can name.

    Args:
        what: one line: what failed, where, with which value.
        code: stable identifier such as `E-SRV-01`; each subclass has a general one.
        why: the cause as far as it is known.
        do: the next action that gets the user out.
        saved: what of the run is kept on disk.
        details: lines printed above the report, one finding a line (config problems, the user's own frames).
    """

    exit_code: ClassVar[int] = 1
    default_code: ClassVar[str] = "E-INT-01"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        why: str = "",
        do: str = "",
        saved: str = "",
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code or self.default_code
        self.why = why
        self.do = do
        self.saved = saved
        self.details = details

    def report(self) -> Report:
        return Report(self.code, self.what, self.why, self.saved, self.do)

    def as_json(self) -> dict[str, Any]:
        """The same report for `last_error.json`."""
        return {**asdict(self.report()), "exit_code": self.exit_code, "details": list(self.details)}


class InternalError(AxolotlError):
    exit_code = 1
    default_code = "E-INT-01"


class ConfigError(AxolotlError):
    exit_code = 2
    default_code = "E-CFG-01"


class EnvironmentFault(AxolotlError):
    exit_code = 3
    default_code = "E-ENV-01"


class DataError(AxolotlError):
    exit_code = 4
    default_code = "E-DAT-01"


class RewardError(AxolotlError):
    exit_code = 5
    default_code = "E-RWD-01"


class ServerError(AxolotlError):
    exit_code = 6
    default_code = "E-SRV-01"


class SyncError(AxolotlError):
    exit_code = 7
    default_code = "E-SYN-01"


class NumericError(AxolotlError):
    exit_code = 8
    default_code = "E-NUM-01"


class StorageError(AxolotlError):
    exit_code = 9
    default_code = "E-STO-01"


class MemoryFault(AxolotlError):
    exit_code = 10
    default_code = "E-MEM-01"


class PeerError(AxolotlError):
    """exit_code_there: what the process that failed exits with, None where it is not known."""

    exit_code = 11
    default_code = "E-PEER-01"

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        why: str = "",
        do: str = "",
        exit_code_there: int | None = None,
    ) -> None:
        super().__init__(what, code=code, why=why, do=do)
        self.exit_code_there = exit_code_there


class StallError(AxolotlError):
    exit_code = 12
    default_code = "E-STALL-01"


class Interrupted(AxolotlError):
    """The run was asked to stop and has saved what it had. 128 + the signal's number, as a shell would say it."""

    default_code = "E-SIG-01"

    def __init__(self, what: str, *, signal_number: int, saved: str = "", do: str = "") -> None:
        super().__init__(what, saved=saved, do=do)
        self.exit_code = 128 + signal_number  # type: ignore[misc]
