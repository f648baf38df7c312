"""From an exception to what the client is told: the one place that decides status and body."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from axolotl.errors import AxolotlError
from axolotl.serving.edge import invalid
from axolotl.serving.guard import error_response
from axolotl.serving.refusals import Refusal

_STATUS_CODES = {413: "E-SRV-14"}
_LOG = logging.getLogger("uvicorn.error")


def refusal_of(error: Exception) -> Refusal:
    """What `error` means to the client. The text of an exception that is not ours stays here: it may hold anything."""
    match error:
        case Refusal():
            return error
        case AxolotlError():
            return Refusal.of(error, 500)
        case RequestValidationError():
            first = error.errors()[0]
            location = [part for part in first["loc"] if part != "body"]
            return invalid(f"{_dotted(location) or 'body'}: {first['msg']}")
        case HTTPException():
            return Refusal(error.status_code, _STATUS_CODES.get(error.status_code, "E-SRV-12"), error.detail)
        case _:
            return Refusal(500, "E-INT-01", "internal error in the server", why=type(error).__name__, do="see its log")


def log_bug(error: Exception) -> None:
    """To the server's log, unless it is an error we have a name for."""
    if not isinstance(error, Refusal | AxolotlError):
        _LOG.error("exception in a streamed answer", exc_info=error)


def add_error_handlers(app: FastAPI) -> None:
    async def answer(_: Request, error: Exception) -> Response:
        return error_response(refusal_of(error))

    for kind in (Refusal, AxolotlError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _dotted(location: list[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
