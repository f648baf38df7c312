"""`axolotl train` without an adapter and with a server of its own: all weights travel, as files, after each step."""

from __future__ import annotations

import itertools
import json
import uuid
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from axolotl.serving.engines.scoring import score
from tests.support.cli import free_port, running
from tests.support.disturbed import MARK, assert_nothing_left
from tests.support.project import make_project, metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 3
PROMPT, TOKENS = [5, 6, 7, 8], [40, 41, 42, 43, 44]
# Called between the generation of a step and its training: the server holds the weights that generated.
REWARDS = f"""

import json
from pathlib import Path

from axolotl.serving.client import ServerClient
from axolotl.serving.server_file import read_server_file


def watching(completions, **kwargs):
    found = read_server_file(Path("sync"))
    with ServerClient(found.url, Path("sync"), 30) as client:
        info = client.wait_ready()
        seen = client.score([{PROMPT}], [{TOKENS}], 1.0, info.adapter_version)[0]
    line = {{"version": info.adapter_version, "held": info.loaded_versions, "logprobs": seen}}
    with open("watched.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    return vowels(completions)
"""


def test_full_fine_tuning_with_a_managed_server(tmp_path: Path, tiny_model: Path) -> None:
    make_project(
        tmp_path,
        tiny_model,
        adapter=None,
        lora_r=None,
        lora_alpha=None,
        lora_target_linear=None,
        trl__use_vllm=True,
        trl__reward_funcs=["project_rewards.watching"],
        vllm={"port": free_port(), "managed": True, "engine": "transformers", "sync_dir": "sync"},
        max_steps=STEPS,
        learning_rate=1e-2,
    )
    with (tmp_path / "project_rewards.py").open("a") as file:
        file.write(REWARDS)
    mark, secret = uuid.uuid4().hex, "hf_thisIsNobodysBusiness"
    with running(tmp_path, "train", "config.yaml", **{MARK: mark, "HF_TOKEN": secret}) as train:
        assert train.wait() == 0, train.output
        assert_nothing_left(mark)
    assert list((tmp_path / "sync").iterdir()) == []
    check_versions(tmp_path, tiny_model)
    steps = metrics(tmp_path / "out")
    assert [step["staleness/max"] for step in steps] == [0] * STEPS
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    assert secret not in train.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def check_versions(directory: Path, model: Path) -> None:
    """Each step was generated with a version of its own, the first with the base model's weights."""
    watched = [json.loads(line) for line in (directory / "watched.jsonl").read_text().splitlines()]
    assert [line["version"] for line in watched] == [1, 2, 3]
    assert [line["held"] for line in watched] == [[1], [2], [3]], "one version of full weights exists at a time"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    of_base = score(base, [PROMPT], [TOKENS], temperature=1.0)[0]
    assert watched[0]["logprobs"] == pytest.approx(of_base, abs=1e-3)
    for earlier, later in itertools.pairwise(watched):
        assert max(abs(a - b) for a, b in zip(earlier["logprobs"], later["logprobs"], strict=True)) > 1e-2
