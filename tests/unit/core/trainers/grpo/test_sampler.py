import pytest

from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.errors import DataError


def test_an_epoch_reaches_every_prompt_once() -> None:
    sampler = GroupSampler(num_prompts=12, prompts_per_step=3, seed=7)
    seen = [index for step in range(sampler.steps_per_epoch) for index in sampler.indices(step)]
    assert sorted(seen) == list(range(12))


def test_epochs_are_shuffled_differently_and_reproducibly() -> None:
    sampler = GroupSampler(num_prompts=12, prompts_per_step=3, seed=7)
    first, second = sampler.indices(0), sampler.indices(sampler.steps_per_epoch)
    assert first != second
    assert GroupSampler(num_prompts=12, prompts_per_step=3, seed=7).indices(4) == second
    assert GroupSampler(num_prompts=12, prompts_per_step=3, seed=8).indices(0) != first


def test_ranks_share_a_step_without_overlap() -> None:
    shards = [GroupSampler(12, 2, seed=1, num_ranks=3, rank=rank) for rank in range(3)]
    whole = GroupSampler(12, 6, seed=1)
    assert [index for shard in shards for index in shard.indices(1)] == whole.indices(1)


def test_what_does_not_fill_a_step_is_counted() -> None:
    sampler = GroupSampler(num_prompts=11, prompts_per_step=4)
    assert (sampler.steps_per_epoch, sampler.left_out) == (2, 3)


def test_too_few_prompts_for_one_step_is_an_error_that_says_how_many() -> None:
    with pytest.raises(DataError, match="3 prompts are too few: one optimizer step takes 4"):
        GroupSampler(num_prompts=3, prompts_per_step=4)


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    assert GroupSampler(6, 2, shuffle=False).indices(1) == [2, 3]


def test_one_prompt_that_is_too_few_is_one() -> None:
    with pytest.raises(DataError, match="1 prompt is too few: one optimizer step takes 2"):
        GroupSampler(num_prompts=1, prompts_per_step=2)
