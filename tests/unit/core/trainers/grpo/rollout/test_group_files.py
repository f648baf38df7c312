import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axolotl.core.trainers.grpo.rollout.group_files import pack_groups, read_state, unpack_groups, write_state
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup
from axolotl.errors import DataError
from tests.support.replay_groups import make_group, make_row

ROWS = [make_row(index) for index in range(4)]
logprob = st.floats(max_value=0.0) | st.just(math.nan)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.lists(st.integers(0, 2**40), max_size=4))
    logprobs = st.lists(logprob, min_size=len(ids), max_size=len(ids)).map(tuple)
    return Completion(
        ids=tuple(ids),
        logprobs=draw(st.none() | logprobs),
        is_truncated=draw(st.booleans()),
        adapter_version=draw(st.integers(0, 2**40)),
        instance_id=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
        is_renormalised=draw(st.booleans()),
    )


groups_of_rows = st.builds(
    CompletionGroup,
    st.sampled_from(ROWS),
    st.lists(completions(), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(groups_of_rows, max_size=4))
def test_groups_come_back_as_they_were(tmp_path: Path, groups: list[CompletionGroup]) -> None:
    records, tensors = pack_groups(groups)
    write_state(tmp_path, "groups", records, tensors)
    again = unpack_groups(*read_state(tmp_path, "groups"), ROWS)
    # NaN equals nothing; the text of a double is the double.
    assert repr(again) == repr(groups)


def test_the_files_are_json_and_safetensors(tmp_path: Path) -> None:
    write_state(tmp_path, "groups", *pack_groups([make_group(1, (0, 2))]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["groups.json", "groups.safetensors"]
    (record,) = json.loads((tmp_path / "groups.json").read_text())
    assert record["row"] == 1 and [c["tokens"] for c in record["completions"]] == [0, 2]


@pytest.mark.parametrize("rows", [ROWS[:1], [make_row(0), make_row(1, ids=(8, 8))]])
def test_another_data_set_is_refused(rows: list, tmp_path: Path) -> None:
    records, tensors = pack_groups([make_group(1)])
    with pytest.raises(DataError, match="row 1 of the data set") as error:
        unpack_groups(records, tensors, rows)
    assert error.value.code == "E-DAT-07"
