"""Multi-token prediction: modules after the last layer that are trained to predict tokens further ahead, as in
DeepSeek-V3.

Module k of D (k = 1, ..., D) has at position i the hidden state of module k - 1 there, after that one's final norm
(module 0 is the model itself), and the embedding of token i + k, by the model's own matrix. It projects both, each
after a norm, the embedding first, from 2 h to h; one decoder layer of the kind of the model's last one and a final norm
follow, and the model's own head gives the logits of token i + k + 1. What is trained is

    main loss + factor / D x sum over k of (sum of module k's losses of positions that count / tokens that count)

A position counts for module k where position i + k, whose label is its target, counts in the main loss and is in the
same sequence, and in the same document where attention does not cross documents: as Megatron masks rolled labels, also
of packed sequences. Every module's sum is divided by the number of tokens of the main loss, as in DeepSeek-V3's report
(1 / T for every k) and in Megatron with ``--calculate-per-token-loss``: one divisor for the whole step, which no plan
changes. Positions that do not count come after all that do in their document, so that causal attention never sees
them from one that counts, and it does not matter what is embedded there.

Modules run in training only. They are no part of the losses of evaluation, and generation ignores them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from hetero_megatron.model.layers import Context, Linear, Norm
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec


def make_prediction(layer: nn.Module, spec: ModelSpec, kernels: KernelPlan) -> None:
    """Give a decoder layer what makes it a module, without what modules share with the model. From then on its forward
    is ``(x, context, embedded)``: x, embedded [b, s, h], between the blocks, of a TP rank's own tokens -> what the head
    gets, [b, s, h].

    The projection is in the dtype of the weights wherever linear modules compute: a rank of a TP group has only its own
    tokens there.
    """
    h = spec.hidden_size
    layer.enorm, layer.hnorm = Norm(spec, h, kernels), Norm(spec, h, kernels)
    layer.eh_proj = Linear(2 * h, h, bias=False, kernels=kernels)
    layer.shared_head = nn.ModuleDict({"norm": Norm(spec, h, kernels)})
    layer.forward = partial(_predict, layer, layer.forward, kernels)  # type: ignore[method-assign]


def _predict(
    layer: Any, run: Callable[..., Any], kernels: KernelPlan, x: torch.Tensor, context: Context, embedded: torch.Tensor
) -> torch.Tensor:
    joined = torch.cat([layer.enorm(embedded), layer.hnorm(x)], dim=-1)
    stream = run(kernels.gemm(joined, layer.eh_proj.weight, None), context)
    return cast(torch.Tensor, layer.shared_head["norm"](stream.sum()))
