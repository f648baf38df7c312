import pytest

from axolotl.utils.schemas.lookup import unknown_key


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("lerning_rate",), "unknown key. Did you mean learning_rate?"),
        (("trl", "num_generation"), "unknown key. Did you mean num_generations?"),
        (("num_generations",), "unknown key; it belongs under trl:"),
        (("gpu_memory_utilization",), "unknown key; it belongs under vllm:"),
        (("trl", "learning_rate"), "unknown key; it belongs at the top level"),
        (("split",), "unknown key; it belongs under datasets:"),
        (("datasets", 3, "pth"), "unknown key. Did you mean path?"),
        (("num_generation",), "unknown key. Did you mean trl.num_generations?"),
        (("special_tokens", "pad"), "unknown key"),
        (("zzz",), "unknown key"),
        (("generation", "x"), "unknown key"),
    ],
)
def test_what_was_meant(path, message):
    assert unknown_key(path) == message
