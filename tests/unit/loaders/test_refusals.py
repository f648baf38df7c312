import pytest

from axolotl.errors import ConfigError
from axolotl.loaders.refusals import refused_by_libraries


def test_what_a_library_refuses_is_a_config_error_with_its_words() -> None:
    with pytest.raises(ConfigError) as problem, refused_by_libraries():
        raise ValueError("Target modules {'q_prj'} not found\nmore about it")
    assert problem.value.exit_code == 2 and "q_prj" in problem.value.why
    assert problem.value.details == ("more about it",)
