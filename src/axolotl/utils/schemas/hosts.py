"""Which host names mean this machine."""

from __future__ import annotations

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})
_THIS_MACHINE = ANY_ADDRESS | {LOOPBACK, "localhost", "::1", "[::1]"}


def is_this_machine(host: str) -> bool:
    return host.lower() in _THIS_MACHINE


def client_address(host: str) -> str:
    """The host to connect to: an address to listen on everywhere is no address to go to."""
    if host in ANY_ADDRESS:
        return LOOPBACK
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
