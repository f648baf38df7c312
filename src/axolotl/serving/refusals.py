"""Answers that are not 2xx: an exception with a status, and its body."""

from __future__ import annotations

from axolotl.errors import AxolotlError
from axolotl.serving.wire import ErrorBody

MAX_TEXT = 2_000


class Refusal(Exception):
    """Raised anywhere below a route; the app answers `status` with `body`.

    Texts may quote what a client sent: they are cut at `MAX_TEXT` characters, and half a surrogate pair, which JSON
    can send but UTF-8 cannot hold, becomes a question mark.
    """

    def __init__(self, status: int, code: str, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.body = ErrorBody(code=code, what=_safe(what), why=_safe(why), do=_safe(do))

    @classmethod
    def of(cls, error: AxolotlError, status: int) -> Refusal:
        return cls(status, error.code, error.what, why=error.why, do=error.do)


def _safe(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 4] + " ..."
    return shown.encode("utf-8", "replace").decode("utf-8")
