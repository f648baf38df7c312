import pytest

from axolotl.cli.invocation import Invocation, parse
from axolotl.errors import ConfigError


def test_values_stay_the_text_that_was_typed():
    invocation = parse(
        ["train", "c.yaml", "--learning_rate", "1e-5", "--trl.num_generations=4", "--wandb-name", "a #b", "--x", "-1"]
    )
    assert (invocation.command, invocation.config) == ("train", "c.yaml")
    assert invocation.overrides == (
        ("learning_rate", "1e-5"),
        ("trl.num_generations", "4"),
        ("wandb_name", "a #b"),
        ("x", "-1"),
    )


def test_a_flag_without_a_value_means_true():
    invocation = parse(["train", "c.yaml", "--trl.vllm_lora_sync", "--seed", "3", "--vllm.managed"])
    assert invocation.overrides == (("trl.vllm_lora_sync", "true"), ("seed", "3"), ("vllm.managed", "true"))


def test_a_value_may_hold_an_equals_sign_or_be_empty():
    assert parse(["train", "c", "--a=b=c", "--d="]).overrides == (("a", "b=c"), ("d", ""))


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--resume"], "resume", True),
        (["--resume=out/checkpoint-3"], "resume", "out/checkpoint-3"),
        ([], "resume", False),
        (["--overwrite"], "overwrite", True),
        (["--overwrite=false"], "overwrite", False),
        (["--dry-run"], "dry_run", True),
        (["--dry_run"], "dry_run", True),
    ],
)
def test_the_flags_of_train(arguments, name, value):
    assert parse(["train", *arguments, "c.yaml"]).flag(name) == value
    assert parse(["train", *arguments, "c.yaml"]).config == "c.yaml"


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help(argv):
    assert parse(argv) == Invocation(wants_help=True)


@pytest.mark.parametrize("argv", [["train", "--help"], ["train", "c.yaml", "-h"], ["train", "--seed", "1", "--help"]])
def test_help_on_a_command(argv):
    assert parse(argv) == Invocation(command="train", wants_help=True)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["trian"], "unknown command trian. Did you mean train?"),
        (["frobnicate"], "unknown command frobnicate"),
        (["train"], "no config file given"),
        (["train", "--seed", "1"], "no config file given"),
        (["train", "a.yaml", "b.yaml"], "b.yaml is one argument too many; the config is a.yaml"),
        (["train", "a.yaml", "--resume", "b"], "b is one argument too many; the config is a.yaml; write --resume=b"),
        (["train", "a.yaml", "-x"], "-x is no flag; flags begin with --"),
        (["train", "a.yaml", "--", "--nproc", "2"], "what follows -- belongs to the launcher, which is not available"),
        (["train", "a.yaml", "--overwrite=maybe"], "--overwrite takes no value but true or false, not maybe"),
        (["verify-checkpoint"], "verify-checkpoint takes one directory"),
        (["verify-checkpoint", "out", "--seed", "1"], "verify-checkpoint takes one directory"),
        (["config-schema", "a.yaml"], "config-schema takes no config"),
        (["config-schema", "--seed", "1"], "config-schema takes no config"),
    ],
)
def test_command_lines_that_mean_nothing(argv, what):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert caught.value.what.startswith(what)
    assert caught.value.exit_code == 2
