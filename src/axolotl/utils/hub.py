"""Whether the model hub can be asked, found out in seconds: the hub's own client retries for most of a minute."""

from __future__ import annotations

from pathlib import Path

_TIMEOUT_S = 5.0
_TRIES = 2


def hub_problem() -> str | None:
    """Why the hub cannot be asked, or None when it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    import httpx

    problem = ""
    for _ in range(_TRIES):
        try:
            httpx.head(constants.ENDPOINT, timeout=_TIMEOUT_S)
            return None
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
    return f"{constants.ENDPOINT} cannot be reached: {problem}"


def looks_like_path(text: str) -> bool:
    """True for what can only be a local path: hub names are `name` or `owner/name`."""
    return text.startswith(("/", ".", "~")) or text.count("/") > 1 or "\\" in text or Path(text).exists()
