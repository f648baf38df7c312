"""The console script: reads the command line, loads the config, and hands over to the command. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import fire

from axolotl import __version__
from axolotl.cli import check, config_schema, help_text, verify_checkpoint
from axolotl.cli.accounts import check_accounts
from axolotl.cli.config import LoadedConfig, dump_config, load_config
from axolotl.cli.invocation import OWN_FLAGS, Invocation, parse
from axolotl.cli.reporting import exit_code_of, recorded_in
from axolotl.core.trainers.grpo.args import reporters
from axolotl.errors import EnvironmentFault
from axolotl.utils.deepspeed_file import find_deepspeed_file
from axolotl.utils.schemas.availability import Command, not_available
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.plan import sync_dir
from axolotl.utils.schemas.requirements import missing_packages


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return exit_code_of(lambda: _run(arguments), only_prints=lambda: _only_prints(arguments))


def _run(arguments: Sequence[str]) -> None:
    invocation = parse(arguments)
    if invocation.wants_version:
        print(f"axolotl {__version__}")
    elif invocation.wants_help:
        text = help_text.GENERAL if invocation.command is None else help_text.COMMANDS[invocation.command]
        print(text, end="")
    else:
        assert invocation.command is not None
        # fire only picks the command: its own reading of values would cut them at `#` and guess types.
        fire.Fire(_commands(invocation), command=[invocation.command], name="axolotl")


def _commands(invocation: Invocation) -> dict[str, Callable[[], None]]:
    def train() -> None:
        _train(invocation)

    def vllm_serve() -> None:
        _vllm_serve(invocation)

    def vllm_stop() -> None:
        _vllm_stop(invocation)

    def check_config() -> None:
        check.run(_load(invocation, "train"))

    def verify() -> None:
        assert invocation.config is not None
        verify_checkpoint.run(Path(invocation.config))

    def schema() -> None:
        config_schema.run(as_markdown=bool(invocation.flag("markdown")))

    return {
        "train": train,
        "vllm-serve": vllm_serve,
        "vllm-stop": vllm_stop,
        "check": check_config,
        "verify-checkpoint": verify,
        "config-schema": schema,
    }


def _train(invocation: Invocation) -> None:
    loaded = _load(invocation, "train")
    refused = not_available(loaded.config, "train")
    if invocation.flag("dry_run"):
        for line in (*loaded.warnings, *refused):
            print(f"warning: {line}", file=sys.stderr)
        print(dump_config(loaded.config), end="")
        return
    _print_warnings(loaded)
    check.refuse(refused, str(loaded.path))
    _check_packages(loaded.config)
    check_accounts(loaded.config, reporters(loaded.config))
    from axolotl.cli import train

    resume = invocation.flag("resume") or loaded.config.resume_from_checkpoint or False
    flags = train.TrainFlags(resume=resume, overwrite=bool(invocation.flag("overwrite")))
    is_main = os.environ.get("RANK", "0") == "0"
    with recorded_in(Path(loaded.config.output_dir)) if is_main else nullcontext():
        train.run(loaded, flags)


def _check_packages(config: AxolotlConfig) -> None:
    missing = missing_packages(config, reporters(config))
    if missing:
        raise EnvironmentFault(
            "the config needs packages that are not installed",
            code="E-ENV-03",
            why=", ".join(missing.values()),
            do=f"pip install {' '.join(repr(package) for package in missing)}, or leave these options out",
        )


def _vllm_serve(invocation: Invocation) -> None:
    loaded = _load(invocation, "vllm-serve")
    _print_warnings(loaded)
    check.refuse(not_available(loaded.config, "vllm-serve"), str(loaded.path))
    from axolotl.cli import vllm_serve

    vllm_serve.run(loaded)


def _vllm_stop(invocation: Invocation) -> None:
    from axolotl.cli import vllm_stop

    if invocation.config is not None:
        vllm_stop.run(sync_dir(_load(invocation, "vllm-serve").config))
    else:
        port = invocation.flag("port")
        vllm_stop.run(vllm_stop.directory_of(int(port) if port else None))


def _load(invocation: Invocation, purpose: Command) -> LoadedConfig:
    assert invocation.command is not None and invocation.config is not None
    loaded = load_config(
        invocation.config, invocation.overrides, purpose=purpose, own_flags=OWN_FLAGS[invocation.command]
    )
    if isinstance(loaded.config.deepspeed, str):
        find_deepspeed_file(loaded.config.deepspeed, loaded.path.parent)
    return loaded


def _print_warnings(loaded: LoadedConfig) -> None:
    for line in loaded.warnings:
        print(f"warning: {line}", file=sys.stderr)


def _only_prints(arguments: Sequence[str]) -> bool:
    runs_for_long = bool(arguments) and arguments[0] in ("train", "vllm-serve")
    return not runs_for_long or "--dry-run" in arguments or "--help" in arguments


if __name__ == "__main__":
    sys.exit(main())
