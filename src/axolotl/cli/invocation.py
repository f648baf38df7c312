"""A command line to plain data. Values stay the text that was typed; the config reader gives them their meaning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axolotl.errors import ConfigError
from axolotl.utils.schemas.scalars import FALSE_WORDS, TRUE_WORDS

# Flags of a command itself; every other flag names an option of the config.
OWN_FLAGS: Mapping[str, tuple[str, ...]] = {
    "train": ("resume", "overwrite", "dry_run"),
    "vllm-serve": (),
    "vllm-stop": ("port",),
    "check": (),
    "verify-checkpoint": (),
    "config-schema": ("markdown",),
}


# Flags with a value of their own, and commands that go without a config.
VALUES = frozenset({"port"})
CONFIG_OPTIONAL = frozenset({"config-schema", "vllm-stop"})


@dataclass(frozen=True)
class Invocation:
    """command: None when only help or the version is wanted. flags: the command's own, True or the text given."""

    command: str | None = None
    config: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    flags: Mapping[str, str | bool] | None = None
    wants_help: bool = False
    wants_version: bool = False

    def flag(self, name: str) -> str | bool:
        return (self.flags or {}).get(name, False)


def parse(argv: Sequence[str]) -> Invocation:
    """Reads the arguments after the program's name.

    Raises:
        ConfigError: an unknown command, a stray argument, a flag without a name.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        return Invocation(wants_help=True)
    if argv[0] in ("-V", "--version"):
        return Invocation(wants_version=True)
    command, arguments = argv[0], list(argv[1:])
    if command not in OWN_FLAGS:
        close = difflib.get_close_matches(command, OWN_FLAGS, n=1)
        what = f"unknown command {command}" + (f". Did you mean {close[0]}?" if close else "")
        raise ConfigError(what, do=f"use one of {', '.join(OWN_FLAGS)}; axolotl --help explains them")
    if any(argument in ("-h", "--help") for argument in arguments):
        return Invocation(command=command, wants_help=True)
    if "--" in arguments:
        raise ConfigError(
            "what follows -- belongs to the launcher, which is not available yet",
            do="leave out -- and what follows it; training uses one process",
        )
    return _parse_arguments(command, arguments)


def _parse_arguments(command: str, arguments: list[str]) -> Invocation:
    config: str | None = None
    overrides: list[tuple[str, str]] = []
    flags: dict[str, str | bool] = {}
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("-"):
            if config is not None:
                hint = f"; write --resume={argument}" if flags.get("resume") is True else ""
                raise _usage(command, f"{argument} is one argument too many; the config is {config}{hint}")
            config = argument
            continue
        name, has_value, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or not name:
            raise _usage(command, f"{argument} is no flag; flags begin with --")
        if name in OWN_FLAGS[command]:
            if name == "resume" and has_value and not value:
                raise _usage(command, "--resume= names no checkpoint; write --resume for the newest one")
            if name in VALUES and not has_value and arguments:
                has_value, value = "=", arguments.pop(0)
            flags[name] = value if has_value else True
        elif has_value:
            overrides.append((name, value))
        elif arguments and not arguments[0].startswith("--"):
            overrides.append((name, arguments.pop(0)))
        else:
            overrides.append((name, "true"))
    for name in flags:
        if name not in {"resume", *VALUES}:
            flags[name] = _switch(command, name, flags[name])
    if command == "config-schema" and (config is not None or overrides):
        raise _usage(command, "config-schema takes no config and no options of one")
    if command == "verify-checkpoint" and (config is None or overrides):
        raise _usage(command, "verify-checkpoint takes one directory and no options of a config")
    if command == "vllm-stop":
        _check_stop(config, overrides, flags)
    if command not in CONFIG_OPTIONAL and config is None:
        raise _usage(command, "no config file given")
    return Invocation(command, config, tuple(overrides), flags)


def _switch(command: str, name: str, value: str | bool) -> bool:
    if isinstance(value, bool):
        return value
    if value.lower() not in TRUE_WORDS | FALSE_WORDS:
        raise _usage(command, f"--{name.replace('_', '-')} takes no value but true or false, not {value}")
    return value.lower() in TRUE_WORDS


def _check_stop(config: str | None, overrides: list[tuple[str, str]], flags: Mapping[str, str | bool]) -> None:
    port = flags.get("port")
    if port is not None and not (isinstance(port, str) and port.isdecimal() and 1 <= int(port) <= 65535):
        raise _usage("vllm-stop", "--port wants a port: --port 8000")
    if config is not None and port is not None:
        raise _usage("vllm-stop", "the config says which server it is; give the config or --port, not both")
    if config is None and overrides:
        raise _usage("vllm-stop", f"--{overrides[0][0]} is an option of a config, and none is given")


def _usage(command: str, what: str) -> ConfigError:
    return ConfigError(what, do=f"see axolotl {command} --help")
