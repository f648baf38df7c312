import importlib.util
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import yaml

from axolotl import __version__
from axolotl.cli import help_text
from axolotl.cli.invocation import OWN_FLAGS
from axolotl.cli.main import main
from axolotl.errors import AxolotlError, ConfigError, DataError, InternalError, Interrupted
from tests.unit.cli.conftest import MINIMAL


@dataclass(frozen=True)
class TrainFlags:
    resume: bool | str
    overwrite: bool


@pytest.fixture
def trained(monkeypatch):
    """Calls of `train.run`, which a stand-in module records; it raises `trained.error` when that is set."""

    class Trained(list):
        error: BaseException | None = None

    calls = Trained()

    def run(loaded, flags):
        calls.append((loaded, flags))
        if calls.error is not None:
            raise calls.error

    module = ModuleType("axolotl.cli.train")
    module.TrainFlags, module.run = TrainFlags, run
    monkeypatch.setitem(sys.modules, "axolotl.cli.train", module)
    monkeypatch.setattr("axolotl.cli.train", module, raising=False)
    return calls


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in OWN_FLAGS)
    assert "\x1b" not in out


@pytest.mark.parametrize("command", OWN_FLAGS)
def test_help_on_a_command_names_its_flags(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out == help_text.COMMANDS[command]
    assert all(f"--{name.replace('_', '-')}" in out for name in OWN_FLAGS[command])


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"axolotl {__version__}\n"


def test_train_gets_the_config_and_the_flags(trained, config_file, capsys):
    path = config_file(MINIMAL + "gc_steps: 1\n")
    assert main(["train", str(path), "--learning_rate", "1e-5", "--resume=out/c-3", "--overwrite"]) == 0
    ((loaded, flags),) = trained
    assert loaded.config.learning_rate == 1e-5
    assert flags == TrainFlags(resume="out/c-3", overwrite=True)
    captured = capsys.readouterr()
    assert captured.err == "warning: c.yaml:8 gc_steps: has no effect here\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "line", "resume"),
    [
        ([], "", False),
        (["--resume"], "", True),
        ([], "resume_from_checkpoint: a/b\n", "a/b"),
        (["--resume"], "resume_from_checkpoint: a/b\n", True),
    ],
)
def test_what_a_run_goes_on_from(trained, config_file, arguments, line, resume):
    assert main(["train", str(config_file(MINIMAL + line)), *arguments]) == 0
    assert trained[0][1].resume == resume


def test_a_value_that_is_not_available_yet_stops_train(trained, config_file, capsys):
    assert main(["train", str(config_file(MINIMAL)), "--trl.reward_num_workers", "2"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "not available yet: trl.reward_num_workers: 2 (set 1: rewards run in the trainer)"
    assert err[1].startswith("ERROR E-CFG-10")
    assert trained == []


def test_a_dry_run_prints_the_config_as_it_would_run(trained, config_file, capsys):
    assert main(["train", str(config_file(MINIMAL)), "--dry-run", "--trl.reward_num_workers", "2"]) == 0
    captured = capsys.readouterr()
    resolved = yaml.safe_load(captured.out)
    assert resolved["trl"]["reward_num_workers"] == 2
    assert resolved["trl"]["loss_type"] == "dapo"
    assert captured.err.startswith("warning: not available yet: trl.reward_num_workers: 2 (set 1")
    assert captured.err.count("\n") == 1
    assert trained == []


def test_a_fault_ends_with_its_report_and_its_exit_code(trained, config_file, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    trained.error = DataError("no column prompt", why="columns: a", do="rename", details=("first", "second"))
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "first",
        "second",
        "ERROR E-DAT-01  no column prompt",
        "  why    columns: a",
        "  do     rename",
    ]
    written = json.loads((tmp_path / "out" / "last_error.json").read_text())
    assert (written["code"], written["exit_code"], written["details"]) == ("E-DAT-01", 4, ["first", "second"])


def test_a_fault_leaves_nothing_among_somebody_elses_files(trained, config_file, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    trained.error = ConfigError("--resume and --overwrite contradict each other")
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 2
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_a_bug_shows_its_traceback_and_asks_for_a_report(trained, config_file, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    trained.error = RuntimeError("boom\nmore")
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ERROR E-INT-01  RuntimeError: boom\n" in err
    assert err.splitlines()[-1].startswith("  do     please report it")
    assert json.loads((tmp_path / "out" / "last_error.json").read_text())["exit_code"] == 1


def test_a_broken_invariant_of_ours_shows_its_traceback_too(trained, config_file, capsys):
    trained.error = InternalError("the totals do not balance")
    assert main(["train", str(config_file(MINIMAL))]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_no_output_directory_no_file(trained, config_file, tmp_path):
    trained.error = AxolotlError("x")
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 1
    assert not (tmp_path / "out").exists()


def test_ctrl_c(trained, config_file, capsys):
    trained.error = KeyboardInterrupt()
    assert main(["train", str(config_file(MINIMAL))]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_pipe_that_breaks_while_training_is_no_way_to_finish(trained, config_file):
    trained.error = BrokenPipeError()
    assert main(["train", str(config_file(MINIMAL))]) == 1


def test_mistakes_show_no_traceback(config_file, capsys):
    assert main(["train", str(config_file(MINIMAL + "sed: 1\n"))]) == 2
    err = capsys.readouterr().err
    assert err.startswith("c.yaml:8 sed: unknown key. Did you mean seed?\nERROR E-CFG-01  1 problem in c.yaml\n")
    assert "Traceback" not in err


def test_check_says_what_the_config_comes_to(config_file, capsys):
    text = MINIMAL + "gc_steps: 1\nvllm: {port: 9000, max_model_len: 600}\n"
    arguments = ["--trl.use_vllm", "--adapter", "lora", "--trl.vllm_lora_sync", "--trl.generation_batch_size", "2"]
    arguments += ["--trl.num_iterations", "3"]
    assert main(["check", str(config_file(text)), *arguments]) == 0
    out = capsys.readouterr().out
    assert "warning: c.yaml:8 gc_steps: has no effect here" in out
    assert (
        "micro_batch_size 8 x gradient_accumulation_steps 1 = 8 completions a step = 1 prompt x num_generations 8"
        in out
    )
    assert (
        "generation_batch_size 2 prompts x num_generations 8 = 16 completions, a multiple of micro_batch_size 8" in out
    )
    assert "num_iterations 3 x 2 optimizer steps = 6 optimizer steps between one generation and the next" in out
    assert "at most 88 tokens: sequence_len 512; vllm.max_model_len 600 - max_completion_length 512 = 88" in out
    assert "http://127.0.0.1:9000" in out
    assert out.endswith("c.yaml: ok\n")


def test_check_names_what_is_not_available_yet(config_file, capsys):
    assert main(["check", str(config_file(MINIMAL)), "--trl.rollout_func", "my.roll"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("not available yet: trl.rollout_func: my.roll (")
    assert "ERROR E-CFG-10  c.yaml is valid, but asks for something" in err


def test_check_is_quick_and_loads_no_torch(config_file):
    program = """
import sys
from axolotl.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "transformers", "trl", "datasets", "vllm", "numpy"} & set(sys.modules))
sys.exit(f"loaded {heavy}" if heavy else code)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", program, "check", str(config_file(MINIMAL))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Time on the processor, so that a busy machine does not fail the test.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_a_reader_that_goes_away_is_no_fault(tmp_path):
    """As in `axolotl config-schema | head -1`; the schema is larger than a pipe's buffer is drained."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "axolotl.cli.main", "config-schema"],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_package_that_is_missing_stops_train_before_it_begins(trained, config_file, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    assert main(["train", str(config_file(MINIMAL)), "--report_to", "wandb"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "ERROR E-ENV-03  the config needs packages that are not installed",
        "  why    report_to: wandb",
        "  do     pip install 'axolotl[wandb]', or leave these options out",
    ]
    assert trained == []


def test_a_refused_directory_gets_no_file(trained, config_file, tmp_path):
    (tmp_path / "out").mkdir()
    trained.error = ConfigError("output_dir out is not empty", code="E-CFG-30")
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 2
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("interrupted", signal_number=2)])
def test_an_interruption_is_recorded(trained, config_file, tmp_path, error):
    (tmp_path / "out").mkdir()
    trained.error = error
    assert main(["train", str(config_file(MINIMAL + "output_dir: out\n"))]) == 130
    written = json.loads((tmp_path / "out" / "last_error.json").read_text())
    assert (written["code"], written["exit_code"], written["what"]) == ("E-SIG-01", 130, "interrupted")
