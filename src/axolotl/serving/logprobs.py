"""Log-probs of a completion in the trainer's terms."""

from __future__ import annotations

import math

from axolotl.serving.wire import Completion


def policy_logprobs(completion: Completion) -> tuple[float, ...]:
    """Log-prob of each token under the sampling policy without truncation (temperature and penalties applied, top_k,
    top_p and min_p not), NaN where it is unknown.

    A truncated distribution is the whole one, cut and divided by the mass that was kept, so multiplying by that mass
    gives the whole one back. With it importance ratios compare like with like: the trainer's log-probs know no
    filters. Without `log_kept` the values are those the token was drawn with.
    """
    kept = completion.log_kept if completion.log_kept is not None else [0.0] * len(completion.logprobs)
    return tuple(
        math.nan if value is None else value + mass for value, mass in zip(completion.logprobs, kept, strict=True)
    )
