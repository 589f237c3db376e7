"""Adding the result of attention over one set of keys to the result over others."""

from __future__ import annotations

import math

import torch


def attn_merge_(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[()]:
    """Softmax over the union of two disjoint sets of keys, from the results over each, in place of ``out`` and ``lse``,
    which have at least fp32. out, other: [b, s, heads, d]; lse, other_lse: [b, heads, s]; -inf where a row saw no key.

    The weight of the new part is sigmoid(other_lse - lse), so no large exponent is ever formed. A row with
    ``other_lse`` -inf changes nothing; its ``other`` must be finite.
    """
    share = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)  # -inf - (-inf) is no number
    torch.logaddexp(lse, other_lse, out=lse)
    out.lerp_(other.to(out.dtype), share.transpose(1, 2)[..., None])
    return ()
