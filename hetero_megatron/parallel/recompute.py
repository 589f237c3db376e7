"""Activation recomputation, applied to a plain model stage from outside."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero_megatron.model import GPTStage
from hetero_megatron.plan import Recompute


def apply_recompute(stage: GPTStage, recompute: Recompute) -> None:
    """Keep only the inputs of the chosen modules in forward; compute them again in backward.

    ``selective`` recomputes the attention core, ``full`` every decoder layer, ``first`` the stage's first n layers.
    Collectives inside a recomputed layer run again, in the same order on every rank of its TP group.
    """
    layers = list(stage.layers())
    if recompute.kind == "selective":
        for layer in layers:
            _recompute(layer.self_attn.core_attention)
    count = {"full": len(layers), "first": recompute.layers}.get(recompute.kind, 0)
    for layer in layers[:count]:
        _recompute(layer)


def _recompute(module: nn.Module) -> None:
    # No random numbers are drawn inside a layer (dropout is refused), so the RNG state need not be saved.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
