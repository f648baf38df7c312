import math

from axolotl.core.trainers.grpo.rollout.collate import collate
from axolotl.core.trainers.grpo.types import Completion, CompletionGroup, PromptRow

PAD, EOS = 0, 9


def completion(*ids: int, logprobs: tuple[float, ...] | None = None) -> Completion:
    values = logprobs if logprobs is not None else tuple(-float(i) for i in ids)
    return Completion(ids, values, is_truncated=False, adapter_version=3, instance_id="a")


def group(prompt: tuple[int, ...], *completions: Completion) -> CompletionGroup:
    return CompletionGroup(PromptRow(0, "text", prompt, {}), completions)


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    groups = [group((5,), completion(1, 2), completion(3)), group((6, 7), completion(4), completion(5))]
    batch = collate(groups, pad_token_id=PAD, eos_token_id=EOS)
    assert batch.prompt_ids.tolist() == [[0, 5], [0, 5], [6, 7], [6, 7]]
    assert batch.prompt_mask.tolist() == [[0, 1], [0, 1], [1, 1], [1, 1]]
    assert batch.completion_ids.tolist() == [[1, 2], [3, 0], [4, 0], [5, 0]]
    assert batch.completion_mask.tolist() == [[1, 1], [1, 0], [1, 0], [1, 0]]
    assert batch.sampling_logps is not None
    assert batch.sampling_logps.tolist() == [[-1, -2], [-3, 0], [-4, 0], [-5, 0]]
    assert batch.adapter_versions == (3, 3, 3, 3)


def test_an_empty_completion_becomes_an_end_token_with_an_unknown_logp() -> None:
    batch = collate([group((5,), completion(), completion(1, 2))], pad_token_id=PAD, eos_token_id=EOS)
    assert batch.completion_ids.tolist() == [[EOS, PAD], [1, 2]]
    assert batch.sampling_logps is not None
    assert math.isnan(batch.sampling_logps[0, 0])


def test_one_completion_without_logps_leaves_the_batch_without_them() -> None:
    bare = Completion((1,), None, is_truncated=False, adapter_version=0, instance_id="a")
    assert collate([group((5,), bare, completion(2))], pad_token_id=PAD, eos_token_id=EOS).sampling_logps is None
