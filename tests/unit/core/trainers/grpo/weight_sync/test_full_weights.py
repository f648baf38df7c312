import torch

from axolotl.core.trainers.grpo.weight_sync.full_weights import shards


def test_files_are_cut_by_size_and_hold_every_tensor_once() -> None:
    weights = [(f"w{index}", torch.full((10,), float(index))) for index in range(5)]
    cut = list(shards(weights, 80, torch.float32))
    assert [list(shard) for shard in cut] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert cut[2]["w4"].tolist() == [4.0] * 10


def test_a_tensor_that_is_larger_than_a_file_has_one_of_its_own() -> None:
    weights = [("a", torch.zeros(2)), ("b", torch.zeros(100)), ("c", torch.zeros(2))]
    assert [list(shard) for shard in shards(weights, 16, torch.float32)] == [["a"], ["b"], ["c"]]


def test_nothing_is_wider_than_the_server_computes_in() -> None:
    weights = [("wide", torch.ones(2)), ("half", torch.ones(2, dtype=torch.float16)), ("ids", torch.ones(2).long())]
    (shard,) = shards(weights, 1000, torch.bfloat16)
    assert [shard[name].dtype for name in ("wide", "half", "ids")] == [torch.bfloat16, torch.float16, torch.int64]
    (shard,) = shards([("half", torch.ones(2, dtype=torch.bfloat16))], 1000, torch.float32)
    assert shard["half"].dtype == torch.bfloat16
