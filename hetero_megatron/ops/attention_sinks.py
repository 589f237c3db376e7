"""Attention sinks (gpt-oss): every query head has a logit that takes part in the softmax and has no value.

That is one more key whose value is zero, so that sinks are merged with the result over all other keys as partial
results are; backward of any attention kernel is then right with the merged output and log-sum-exp.
"""

from __future__ import annotations

import torch


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) with the sinks among the keys, from those without.

    out: [b, s, heads, d]; lse: [b, heads, s] in at least fp32; sinks: [heads]. A row that saw no key has only its sink.
    """
    wide = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - wide)  # of all keys that are no sink
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), torch.logaddexp(lse, wide)


def sink_gradient(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks.

    Args:
        delta: [b, heads, s], sum over features of the output's gradient and the output; lse: the merged one.
    """
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)
