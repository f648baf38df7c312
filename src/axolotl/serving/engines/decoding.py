"""Batched sampling and scoring with a transformers causal language model.

    prompts ─ left padded ─► one prefill a prompt ─► cache row repeated for each completion
                                  └─► loop: draw a token a row ─ drop finished rows ─ one forward of the last tokens

A completion depends on its prompt, its seed and the sampling options; the rest of the batch changes it by float
rounding only. Used by the transformers engine and, in process, by the trainer without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from axolotl.serving.engines.cache import growing_cache
from axolotl.serving.engines.sampling import (
    StopRule,
    UniformStream,
    draw,
    log_probs_of,
    process,
    stop_rule,
)
from axolotl.serving.wire import Completion, FinishReason, Group, Sampling

DEFAULT_CACHE_TOKENS = 65_536


class DecodingCancelled(Exception):
    """`is_cancelled` said so; nothing of the request is kept."""


@dataclass
class _Row:
    """One completion being written."""

    prompt: int
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[Sequence[int]],
    *,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    max_cache_tokens: int = DEFAULT_CACHE_TOKENS,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[Group]:
    """Sample `sampling.n` completions of each prompt.

    Args:
        model: a causal language model; put in evaluation mode for the call.
        prompts: token ids, none of them empty.
        seeds: `[len(prompts)][sampling.n]`, 0 <= seed < 2**63.
        eos_token_ids: tokens that end a completion (and are part of it).
        pad_token_id: any id of the vocabulary; padded positions are masked.
        max_cache_tokens: completions are decoded in batches whose cache holds at most this many positions, though
            never less than one completion.
        is_cancelled: asked before each step; true raises `DecodingCancelled`.

    Returns:
        One group a prompt, in order. Log-probs are those of the processed distribution (see `sampling.process`).

    Raises:
        EngineRejects: an option of `sampling` that is not supported, by name.
    """
    rule = stop_rule(sampling, frozenset(eos_token_ids))
    rows = [_Row(index, seed) for index, row_seeds in enumerate(seeds) for seed in row_seeds]
    longest = max(map(len, prompts)) + sampling.max_tokens
    batch_size = max(1, max_cache_tokens // longest)
    with _inference(model):
        for start in range(0, len(rows), batch_size):
            _decode_rows(model, prompts, rows[start : start + batch_size], sampling, rule, pad_token_id, is_cancelled)
    groups: list[list[Completion]] = [[] for _ in prompts]
    for row in rows:
        groups[row.prompt].append(
            Completion(ids=row.ids, logprobs=list(row.logprobs), finish_reason=row.finish_reason or "length")
        )
    return [Group(index=index, completions=completions) for index, completions in enumerate(groups)]


def _decode_rows(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rows: list[_Row],
    sampling: Sampling,
    rule: StopRule,
    pad_token_id: int,
    is_cancelled: Callable[[], bool],
) -> None:
    """Write `rows` to their end. Tensors hold the rows still alive, in order."""
    device = model.device
    used = sorted({row.prompt for row in rows})
    ids, mask = left_pad([prompts[index] for index in used], pad_token_id, device)
    cache = growing_cache(model, capacity=ids.shape[1] + sampling.max_tokens)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    row_of_prompt = {prompt: position for position, prompt in enumerate(used)}
    source = torch.tensor([row_of_prompt[row.prompt] for row in rows], device=device)
    cache.batch_select_indices(source)
    logits, mask = output.logits[:, -1][source], mask[source]
    is_padded = bool((mask == 0).any())
    positions = mask.sum(-1)
    seen = _seen_tokens(ids, mask, source, logits.shape[-1]) if sampling.repetition_penalty != 1.0 else None
    uniforms = UniformStream([row.seed for row in rows])
    alive = list(range(len(rows)))

    for step in range(sampling.max_tokens):
        if is_cancelled():
            raise DecodingCancelled
        forbidden = rule.forbidden_early if step < rule.min_tokens else ()
        processed = process(logits, sampling, seen=seen, forbidden=forbidden)
        if sampling.temperature == 0.0:
            tokens = processed.argmax(-1)
            logps = log_probs_of(processed, tokens)
        else:
            tokens, logps = draw(processed, uniforms.next(alive))
        keep = _record(rows, alive, tokens.tolist(), logps.tolist(), rule)
        if not keep or step + 1 == sampling.max_tokens:
            return
        if len(keep) < len(alive):
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            tokens, mask, positions = tokens[index], mask[index], positions[index]
            seen = seen[index] if seen is not None else None
            alive = [alive[position] for position in keep]
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        output = model(
            input_ids=tokens[:, None],
            attention_mask=mask if is_padded else None,
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1]
        positions = positions + 1


def _record(rows: list[_Row], alive: list[int], tokens: list[int], logps: list[float], rule: StopRule) -> list[int]:
    """Append one token to each alive row; returns the positions in `alive` of the rows that go on."""
    keep = []
    for position, (index, token, logp) in enumerate(zip(alive, tokens, logps, strict=True)):
        row = rows[index]
        row.ids.append(token)
        row.logprobs.append(logp)
        if token in rule.stop_ids:
            row.finish_reason = "stop"
        else:
            keep.append(position)
    return keep


def _seen_tokens(ids: torch.Tensor, mask: torch.Tensor, source: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`[rows, vocab]` bool: the tokens of each row's prompt, padding left out."""
    counts = torch.zeros(len(source), vocab_size, dtype=mask.dtype, device=ids.device)
    return counts.scatter_add_(1, ids[source], mask) > 0


def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    temperature: float,
    *,
    max_logit_rows: int = 1_024,
) -> list[list[float]]:
    """Log-probs of `tokens[i]` after `prompts[i]`, one a token, of the temperature-scaled distribution.

    Temperature 0 scores at temperature 1, as `decode` does. Rows are forwarded one by one, and logits are made for at
    most `max_logit_rows` positions at once.
    """
    results: list[list[float]] = []
    with _inference(model):
        for prompt, completion in zip(prompts, tokens, strict=True):
            if not completion:
                results.append([])
                continue
            ids = torch.tensor([[*prompt, *completion]], device=model.device)
            values: list[float] = []
            for start in range(len(prompt) - 1, ids.shape[1] - 1, max_logit_rows):
                stop = min(start + max_logit_rows, ids.shape[1] - 1)
                visible = ids[:, :stop]
                logits = model(input_ids=visible, use_cache=False, logits_to_keep=stop - start).logits[0].float()
                logits = logits / (temperature or 1.0)
                values += log_probs_of(logits, ids[0, start + 1 : stop + 1]).tolist()
            results.append(values)
    return results


def left_pad(
    sequences: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[len(sequences), longest]` int64, padding on the left."""
    width = max(map(len, sequences))
    ids = torch.full((len(sequences), width), pad_token_id)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode and no autograd, put back afterwards."""
    was_training = model.training
    model.train(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
