"""Answers that are not 2xx: an exception with a status, and its body."""

from __future__ import annotations

from axolotl.errors import AxolotlError
from axolotl.serving.wire import ErrorBody


class Refusal(Exception):
    """Raised anywhere below a route; the app answers `status` with `body`."""

    def __init__(self, status: int, code: str, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.body = ErrorBody(code=code, what=what, why=why, do=do)

    @classmethod
    def of(cls, error: AxolotlError, status: int) -> Refusal:
        return cls(status, error.code, error.what, why=error.why, do=error.do)
