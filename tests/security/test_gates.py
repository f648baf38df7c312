"""What no line of ours may do, whatever it is for. Each gate has the files that are let through, with the reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from axolotl.serving.app import ServerState, build_app

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PICKLING = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
SWITCHES = frozenset({"shell", "allow_pickle", "trust_remote_code"})
ROUTES = {
    ("GET", "/health/"),
    ("GET", "/metrics/"),
    ("GET", "/progress/"),
    ("GET", "/server_info/"),
    ("POST", "/clear_lora_adapter/"),
    ("POST", "/generate/"),
    ("POST", "/session/"),
    ("POST", "/set_lora_adapter/"),
    ("POST", "/set_weights/"),
    ("POST", "/link_weights/"),
    ("POST", "/receive_weights/"),
}


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that runs, or may run, what was read from somewhere."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if each.name.partition(".")[0] in PICKLING)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in PICKLING:
                yield node.lineno, module
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield node.lineno, "torch.load"
            case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load" | "full_load" as name):
                yield node.lineno, f"yaml.{name}"
            case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen" as name):
                yield node.lineno, f"os.{name}"
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield node.lineno, name
            case ast.keyword(
                arg="shell" | "allow_pickle" | "trust_remote_code" as name, value=ast.Constant(value=True)
            ):
                yield node.value.lineno, f"{name}=True"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import torch.nn, cloudpickle.x",
        "from pickle import loads",
        "x = torch.load(path)",
        "load = torch.load",
        "yaml.load(text)",
        "os.system('ls')",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_gate_sees(text: str) -> None:
    assert len(list(dangers(ast.parse(text)))) == 1


def test_nothing_in_src_unpickles_or_runs_what_was_read() -> None:
    assert len(SOURCES) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        for line, name in dangers(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("word", ["pkill", "pgrep", "killall"])
def test_processes_are_never_ended_by_name(word: str) -> None:
    """Neither in code nor in what we tell people to type: other people's servers have the same names."""
    texts = [*SOURCES, *ROOT.glob("*.md"), ROOT / "Makefile"]
    for folder in ("docs", "examples", "scripts"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".qmd", ".md", ".py", ".yaml", ".sh")]
    found = [str(path.relative_to(ROOT)) for path in texts if re.search(rf"\b{word}\b", path.read_text())]
    assert not found


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_variables_that_open_the_engine_are_only_refused(name: str) -> None:
    found = [path.relative_to(ROOT / "src/axolotl").as_posix() for path in SOURCES if name in path.read_text()]
    assert found == ["serving/engines/vllm_environment.py"]
    assert (ROOT / "src/axolotl/serving/engines/vllm_environment.py").read_text().count(name) == 1, "REFUSED_VARIABLES"


def test_the_routes_are_these_and_no_others(tmp_path: Path) -> None:
    app = build_app(ServerState(instance_id="i", token="t", sync_dir=tmp_path, max_held=3))
    assert {(method, route.path) for route in app.routes for method in route.methods} == ROUTES
