"""Batched sampling with a transformers causal language model.

    prompts ─ left padded ─► one prefill a prompt ─► cache row repeated for each completion
                                  └─► loop: draw a token a row ─ drop finished rows ─ one forward of the last tokens
                                                                      └─► a group whose rows are all done is reported

A completion depends on its prompt, its seed and the sampling options; the rest of the batch changes it by float
rounding only. Used by the transformers engine and, in process, by the trainer without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from axolotl.serving.engines.cache import growing_cache
from axolotl.serving.engines.groups import Groups, Row
from axolotl.serving.engines.history import TokenHistory
from axolotl.serving.engines.inference import DecodingCancelled, inference
from axolotl.serving.engines.options import TokenRules, token_rules
from axolotl.serving.engines.sampling import UniformStream, adjust, draw, log_probs_of, truncate
from axolotl.serving.engines.work import Work
from axolotl.serving.wire import Group, Sampling

DEFAULT_CACHE_TOKENS = 65_536

#: Positions of one forward pass over prompts. It bounds the memory of that pass, and the time in which nothing is
#: counted.
PREFILL_TOKENS = 4_096


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
    on_group: Callable[[Group], None] = lambda group: None,
    work: Work | None = None,
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
        is_cancelled: asked before each forward pass; true raises `DecodingCancelled`.
        on_group: called with each group as soon as its last completion is finished.
        work: counts the tokens as they are processed.

    Returns:
        One group a prompt, in order. Log-probs are those of the distribution the token was drawn from.

    Raises:
        EngineRejects: an option of `sampling` that is not supported, by name.
    """
    finished: list[Group] = []

    def report(group: Group) -> None:
        finished.append(group)
        on_group(group)

    vocab_size = int(model.config.get_text_config().vocab_size)
    request = _Request(
        model=model,
        prompts=prompts,
        sampling=sampling,
        rules=token_rules(sampling, frozenset(eos_token_ids), vocab_size),
        groups=Groups(seeds, report),
        pad_token_id=pad_token_id,
        is_cancelled=is_cancelled,
        work=work if work is not None else Work(),
    )
    rows = request.groups.rows
    longest = max(map(len, prompts)) + sampling.max_tokens
    batch_size = max(1, max_cache_tokens // longest)
    with inference(model):
        for start in range(0, len(rows), batch_size):
            _decode_rows(request, rows[start : start + batch_size])
    return sorted(finished, key=lambda group: group.index)


@dataclass(frozen=True)
class _Request:
    """The arguments of `decode`, checked."""

    model: PreTrainedModel
    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    rules: TokenRules
    groups: Groups
    pad_token_id: int
    is_cancelled: Callable[[], bool]
    work: Work

    def check_cancelled(self) -> None:
        if self.is_cancelled():
            raise DecodingCancelled


@dataclass
class _Batch:
    """Rows being decoded together; the tensors hold those still alive, in the order of `alive`.

    alive: indices into `rows`. mask: `[alive, positions]`. positions: `[alive]`, of the token that comes next.
    logits: `[alive, vocab]` for that token.
    """

    rows: list[Row]
    alive: list[int]
    cache: DynamicCache
    mask: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    history: TokenHistory
    is_padded: bool
    bias: torch.Tensor | None
    uniforms: UniformStream = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = UniformStream([row.seed for row in self.rows])

    def keep(self, kept: list[int]) -> None:
        """Go on with these of the alive rows only."""
        index = torch.tensor(kept, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.history.select(index)
        self.alive = [self.alive[position] for position in kept]


def _decode_rows(request: _Request, rows: list[Row]) -> None:
    """Write `rows` to their end."""
    batch = _prefill(request, rows)
    for step in range(request.sampling.max_tokens):
        request.check_cancelled()
        tokens, kept = _sample(request, batch, step)
        if not kept:
            return
        if len(kept) < len(batch.alive):
            tokens = tokens[torch.tensor(kept, device=tokens.device)]
            batch.keep(kept)
        batch.history.add(tokens)
        _forward(request, batch, tokens)


def _prefill(request: _Request, rows: list[Row]) -> _Batch:
    """The prompts of `rows` through the model, each once and in pieces, then a cache row for each completion."""
    model = request.model
    used = sorted({row.prompt for row in rows})
    ids, mask = left_pad([request.prompts[index] for index in used], request.pad_token_id, model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = growing_cache(model, capacity=ids.shape[1] + request.sampling.max_tokens)
    size = max(1, PREFILL_TOKENS // len(used))
    for start in range(0, ids.shape[1], size):
        request.check_cancelled()
        piece = slice(start, start + size)
        output = model(
            input_ids=ids[:, piece],
            attention_mask=mask[:, : piece.stop],
            position_ids=positions[:, piece],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        request.work.read(int(mask[:, piece].sum()))
    row_of_prompt = {prompt: position for position, prompt in enumerate(used)}
    source = torch.tensor([row_of_prompt[row.prompt] for row in rows], device=model.device)
    cache.batch_select_indices(source)
    logits, mask = output.logits[:, -1][source], mask[source]
    vocab_size = logits.shape[-1]
    return _Batch(
        rows=rows,
        alive=list(range(len(rows))),
        cache=cache,
        mask=mask,
        positions=mask.sum(-1),
        logits=logits,
        history=TokenHistory.of_prompts(ids[source], mask, vocab_size, request.sampling, request.rules),
        is_padded=bool((mask == 0).any()),
        bias=request.rules.bias(vocab_size, model.device),
    )


def _sample(request: _Request, batch: _Batch, step: int) -> tuple[torch.Tensor, list[int]]:
    """One token for each alive row: the tokens `[alive]`, and which positions of `alive` go on."""
    sampling, rules = request.sampling, request.rules
    forbidden = rules.forbidden_early if step < rules.min_tokens else ()
    whole = adjust(batch.logits, sampling, rules, batch.history, bias=batch.bias, forbidden=forbidden)
    logits, log_kept = truncate(whole, sampling)
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        logprobs = log_probs_of(logits, tokens)
    else:
        tokens, logprobs = draw(logits, batch.uniforms.next(batch.alive))
    written = [batch.rows[index] for index in batch.alive]
    for row, token, logprob in zip(written, tokens.tolist(), logprobs.tolist(), strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)
    if log_kept is not None:
        for row, mass in zip(written, log_kept.tolist(), strict=True):
            row.log_kept.append(mass)
    request.work.sampled(len(written))
    return tokens, _unfinished(request, written, is_last=step + 1 == sampling.max_tokens)


def _unfinished(request: _Request, written: list[Row], *, is_last: bool) -> list[int]:
    """Positions of the rows that go on; the others are finished."""
    kept = []
    for position, row in enumerate(written):
        if row.ids[-1] in request.rules.stop_ids:
            row.finish_reason = "stop"
        elif not is_last:
            kept.append(position)
            continue
        request.groups.finish(row)
    return kept


def _forward(request: _Request, batch: _Batch, tokens: torch.Tensor) -> None:
    """The alive rows' newest tokens through the model."""
    batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.alive), 1)], dim=1)
    output = request.model(
        input_ids=tokens[:, None],
        attention_mask=batch.mask if batch.is_padded else None,
        position_ids=batch.positions[:, None],
        past_key_values=batch.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    batch.logits = output.logits[:, -1]
    batch.positions = batch.positions + 1


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
