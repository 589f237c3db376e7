"""Tensor and sequence parallelism, applied to a plain model stage from outside.

The stage was built with the local sizes of its :class:`~hetero_megatron.spec.Share`. Norms and residuals work on
a token shard; attention, MLP and head see all tokens of the micro-batch (gathered by a pre-hook) and return
partial sums that are scattered back to token shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from hetero_megatron.comm import Group
from hetero_megatron.model.gpt import Embedding, GPTStage
from hetero_megatron.model.layers import Attention, Linear, sum_heads
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.parallel.collectives import (
    gather_tokens,
    max_over_ranks,
    scatter_tokens,
    sum_of_ranks,
    sum_over_ranks,
)
from hetero_megatron.parallel.vocab import VocabParallelEmbedding


class RowParallelLinear(nn.Module):
    """A linear layer cut along its input: partial products are summed over the group, then the bias is added once."""

    def __init__(self, linear: Linear, group: Group, shards: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.bias, self.product = linear.weight, linear.bias, linear.product
        for name, adapter in linear.named_children():
            self.add_module(name, adapter)
        self.group, self.shards = group, shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, this rank's inputs] -> [b, its tokens, outputs]."""
        y = scatter_tokens(self.product(x, None), self.group, self.shards)
        return y if self.bias is None else y + self.bias


class TensorMaxima:
    """Largest magnitudes of whole tensors from those of the parts that the ranks of a group have, for products in fp8.

    Args:
        row: the weight is cut along its input, as x is, and dy is whole; else it is cut along its output, as dy is.
    """

    def __init__(self, group: Group, row: bool) -> None:
        self.group, self.row = group, row

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [b], weight: [] -> the same, over all ranks; in one exchange."""
        maxima = max_over_ranks(torch.cat([x, weight[None]]), self.group)
        return maxima[:-1], maxima[-1]

    def backward(self, dy: torch.Tensor) -> torch.Tensor:
        """dy: [b], largest magnitudes by sequence -> the same, over all ranks."""
        return dy if self.row else max_over_ranks(dy, self.group)


class SumHeads:
    """Squares of queries and keys, summed over the heads of all ranks of the group, a copied key-value head once.

    Args:
        kv_heads: of every rank, half-open.
    """

    def __init__(self, group: Group, kv_heads: Sequence[tuple[int, int]]) -> None:
        self.group, earlier_heads = group, kv_heads[: group.index]
        own_heads = range(*kv_heads[group.index])
        self._counted = [not any(a <= head < b for a, b in earlier_heads) for head in own_heads]

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """q: [b, s, heads], k: [b, s, kv_heads] -> [b, s, 2]."""
        counted = k if all(self._counted) else k * k.new_tensor(self._counted)
        return sum_over_ranks(sum_heads(q, counted), self.group)


class GatheredInput:
    """Makes the input of a block, of which each rank has some tokens, whole. ``run``: (those of this rank) -> all."""

    def __init__(self, group: Group, shards: Sequence[int]) -> None:
        self.run: Callable[[torch.Tensor], torch.Tensor] = lambda x: gather_tokens(x, group, shards)

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.run(args[0]), *args[1:])


def gather_input(block: nn.Module, group: Group, shards: Sequence[int]) -> None:
    block.gathered = GatheredInput(group, shards)  # type: ignore[assignment]
    block.register_forward_pre_hook(block.gathered)  # type: ignore[arg-type]


def apply_tensor_parallel(
    stage: GPTStage, group: Group, shards: Sequence[int], vocab: tuple[int, int], kv_heads: Sequence[tuple[int, int]]
) -> None:
    """Make ``stage`` compute its TP rank's part.

    Args:
        group: the unit's ranks; vocab: this rank's rows; kv_heads: of every rank.
        shards: tokens per rank (summing to the sequence length); read in every forward, so a list may change.
    """
    if group.size == 1:
        return

    def own_tokens(x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, ..] -> [b, this rank's tokens, ..]."""
        start = sum(shards[: group.index])
        return x[:, start : start + shards[group.index]]

    def own_positions(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (own_tokens(args[0]), *args[1:])

    stage.own_tokens = own_tokens
    for layer in stage.layers():
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            mixer.sum_heads = SumHeads(group, kv_heads)
        norm: Any = getattr(mixer, "norm", None)
        if layer.kind.mixer == "mamba2" and norm.groups < group.size:  # some are on several ranks
            norm.over_ranks = partial(sum_of_ranks, group=group)
        # A mixture of experts routes the tokens that a rank has; only what they share is cut as a dense MLP is.
        mlp = layer.mlp.shared_expert if isinstance(layer.mlp, MoEMLP) else layer.mlp
        for block, row in ((mixer, "o_proj"), (mlp, "down_proj")):
            if block is None:
                continue
            gather_input(block, group, shards)
            for name, linear in block.named_children():
                if isinstance(linear, Linear):
                    linear.maxima = TensorMaxima(group, name == row)
            setattr(block, row, RowParallelLinear(getattr(block, row), group, shards))
    if stage.has_embed or stage.predictions:
        stage.model["embed_tokens"] = VocabParallelEmbedding(
            cast(Embedding, stage.model["embed_tokens"]).weight, group, vocab, shards
        )
        if "embed_positions" in stage.model:
            stage.model["embed_positions"].register_forward_pre_hook(own_positions)
    if stage.has_head:
        gather_input(stage.lm_head, group, shards)
