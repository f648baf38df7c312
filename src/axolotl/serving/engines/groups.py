"""Completions being written, and the groups they make: each is reported when its last completion ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from axolotl.serving.wire import Completion, FinishReason, Group


@dataclass
class Row:
    """One completion being written. log_kept: empty where no filter is on."""

    prompt: int
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_kept: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def completion(self) -> Completion:
        return Completion(
            ids=self.ids,
            logprobs=list(self.logprobs),
            finish_reason=self.finish_reason,
            log_kept=self.log_kept or None,
        )


class Groups:
    """The rows of a request, prompt by prompt. `finish` a row once; `report` gets each group that is complete."""

    def __init__(self, seeds: Sequence[Sequence[int]], report: Callable[[Group], None]) -> None:
        self._rows = [[Row(index, seed) for seed in row] for index, row in enumerate(seeds)]
        self._missing = [len(row) for row in seeds]
        self._report = report

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self._rows for row in rows]

    def finish(self, row: Row) -> None:
        self._missing[row.prompt] -= 1
        if not self._missing[row.prompt]:
            self._report(Group(index=row.prompt, completions=[row.completion() for row in self._rows[row.prompt]]))
