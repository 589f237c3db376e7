"""Dropout in Hugging Face models, at their own places, with masks that are given: of the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.ops.dropout import (
    AFTER_ATTENTION,
    AFTER_MLP,
    EMBEDDING,
    SCORES,
    Draws,
    ScoreDropout,
    definition,
    score_factors,
)
from hetero_megatron.spec import Dropout


def _first(module: Any, *names: str) -> Any:
    """The first of these that the module has."""
    return next(getattr(module, name) for name in names if getattr(module, name, None) is not None)


def _attention(layer: Any) -> Any:
    return _first(layer, "self_attn", "linear_attn", "mamba", "attn", "attention", "self_attention")


def _added(layer: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The modules of a layer whose outputs are added to the residual stream: GPT-2 has some for dropout, others none,
    so they are the blocks, or the norms after these."""
    if hasattr(layer, "attn"):
        return layer.attn.resid_dropout, layer.mlp.dropout
    if hasattr(layer, "post_self_attn_layernorm"):  # GLM-4
        return layer.post_self_attn_layernorm, layer.post_mlp_layernorm
    if hasattr(layer, "post_feedforward_layernorm"):
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm
    return _attention(layer), layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp


class HFDropout:
    """Makes a Hugging Face model drop elements in every forward from :meth:`begin` on."""

    def __init__(self, model: torch.nn.Module, dropout: Dropout, seed: int) -> None:
        self.dropout, self.seed, self.draws = dropout, seed, Draws(seed, 0, 0)
        inner: Any = model.base_model if model.base_model is not model else model.model  # Llama 4 names no base
        for i, layer in enumerate(_first(inner, "layers", "h")):
            if dropout.attention:
                _attention(layer).score_factors = self._scores(i)
            if dropout.hidden:
                for module, site in zip(_added(layer), (AFTER_ATTENTION, AFTER_MLP), strict=True):
                    self._after(module, i, site)
            if dropout.hidden and hasattr(layer, "embedding"):  # of a module that predicts further tokens
                self._after(layer.embedding, i, EMBEDDING)
        if dropout.hidden:
            self._after(_first(inner, "drop", "embed_tokens", "embed_in", "word_embeddings"), 0, EMBEDDING)

    def begin(self, step: int, sample: int) -> None:
        """The next forward is of this step; its first row is this global sample."""
        self.draws = Draws(self.seed, step, sample)

    def _after(self, module: torch.nn.Module, layer: int, site: int) -> None:
        def hook(_: Any, args: Any, out: Any) -> Any:
            x = out[0] if isinstance(out, tuple) else out
            x = x.view(*args[0].shape[:2], -1) if args else x  # Llama 4's experts put sequences one after the other
            tokens = torch.arange(x.shape[1])
            (factors,) = definition(
                torch.ones_like(x), tokens, self.dropout.hidden, self.draws.key(layer, site), self.draws.sample, 0
            )
            return (x * factors, *out[1:]) if isinstance(out, tuple) else x * factors

        module.register_forward_hook(hook)

    def _scores(self, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def factors(probs: torch.Tensor) -> torch.Tensor:
            key = self.draws.key(layer, SCORES)
            return score_factors(ScoreDropout(self.dropout.attention, key, self.draws.sample, 0), probs)

        return factors
