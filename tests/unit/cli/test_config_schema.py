import json
import re

from axolotl.cli.config_schema import SECTIONS, markdown
from axolotl.cli.main import main
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.lookup import sections


def test_the_schema_is_json_with_every_option(capsys):
    assert main(["config-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(AxolotlConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["TRLConfig"]["properties"]["num_generations"]["null_means"] == 8


def test_every_option_is_in_the_tables_once(capsys):
    assert main(["config-schema", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert text == markdown() + "\n"
    rows = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    expected = [name for model in sections().values() for name in model.model_fields]
    assert sorted(rows) == sorted(expected)


def test_every_section_has_a_table():
    assert {model for _, model in SECTIONS} >= set(sections().values()) - {AxolotlConfig}


def test_rows_say_type_default_and_meaning():
    lines = markdown().splitlines()
    assert any(line.startswith("| `num_generations` | int | `8` | Completions sampled") for line in lines)
    assert any(line.startswith("| `base_model` | text | required | Model to train") for line in lines)
    assert any(line.startswith("| `bf16` | bool or `auto` | `auto` |") for line in lines)
    assert any(line.startswith("| `reward_weights` | list of float | unset |") for line in lines)
    assert all(line.count(" | ") == 3 for line in lines if line.startswith("| `"))


def test_every_option_is_described_in_one_sentence():
    for model in sections().values():
        for name, field in model.model_fields.items():
            text = field.description
            assert (text and text[0].isupper()) or text[0] == "`", name
            assert text.endswith("."), name
            assert len(text) <= 120, name
