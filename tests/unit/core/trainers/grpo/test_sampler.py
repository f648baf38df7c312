import pytest

from axolotl.core.trainers.grpo.sampler import GroupSampler
from axolotl.core.trainers.grpo.span import Span
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


def test_the_steps_of_a_rollout_share_its_prompts() -> None:
    """Two slices of two prompts, three times over: six steps on four prompts."""
    sampler = GroupSampler(9, 2, shuffle=False, span=Span(2, 3))
    assert (sampler.steps_per_epoch, sampler.left_out) == (12, 1)
    assert [sampler.indices(step) for step in (0, 5, 6, 11)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [sampler.epoch_of(step) for step in (0, 11, 12)] == [0, 0, 1]
    assert sampler.indices(12) == [0, 1, 2, 3]


def test_ranks_share_a_rollout_without_overlap() -> None:
    shards = [GroupSampler(12, 1, seed=1, num_ranks=3, rank=rank, span=Span(2)) for rank in range(3)]
    assert sorted(i for shard in shards for step in (0, 2) for i in shard.indices(step)) == list(range(12))


def test_ranks_share_each_slice_of_a_rollout() -> None:
    """A step learns from the same prompts, however many ranks there are."""
    shards = [GroupSampler(8, 1, shuffle=False, num_ranks=2, rank=rank, span=Span(2)) for rank in range(2)]
    assert [shard.indices(2) for shard in shards] == [[4, 6], [5, 7]]
    assert GroupSampler(8, 2, shuffle=False, span=Span(2)).indices(2) == [4, 5, 6, 7]


def test_too_few_prompts_for_a_rollout_name_what_made_it_long() -> None:
    with pytest.raises(DataError, match="3 prompts are too few: one rollout of 2 optimizer steps takes 4") as problem:
        GroupSampler(3, 2, span=Span(2, 5))
    assert "trl.generation_batch_size" in problem.value.do
