"""Counting which experts tokens choose, and what balances them: losses of the router's logits, and its bias.

All of it happens in backward, which passes every token of a step once: so what a recomputed layer does twice in forward
is counted once, and an evaluation counts nothing. The values of a step are sums over tokens of all ranks, as gradients
are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.ops.router import TINY, choose, scores_of
from hetero_megatron.ops.spec import wide
from hetero_megatron.parallel.collectives import sum_of_ranks
from hetero_megatron.plans import Plan, Stage, locate, stage_at
from hetero_megatron.plans.experts import destinations, expert_groups, run_layers, sequence_group
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.moe import Balancing, MoE


@dataclass(frozen=True)
class StepRouting:
    """Where the tokens of one step went, equal on all ranks.

    Attributes:
        load: by layer [experts] int64, how many tokens chose each expert.
        rank_rows: [ranks of the plan] int64, how often each computed an expert, or some of its columns, for a token.
        losses: the sequence loss and the z-loss by name, those that have a coefficient: means over layers, without it.
    """

    load: dict[int, torch.Tensor]
    rank_rows: torch.Tensor
    losses: dict[str, float]


class LoadBalance:
    """One rank's part. Built alike on every rank of the plan.

    Args:
        model: whose routers are observed from now on; dtype: of its activations.

    Attributes:
        seed: what the gradient of a token's loss begins with (see ``Runtime.train_step``).
    """

    def __init__(
        self, model: GPTStage, plan: Plan, spec: ModelSpec, balancing: Balancing, comm: Comm, dtype: torch.dtype
    ) -> None:
        assert spec.moe is not None
        self.plan, self.spec, self.balancing = plan, spec, balancing
        self.moe, self.seq_length, self.seed = spec.moe, plan.seq_length, 1.0
        stage = stage_at(plan, locate(plan, comm.rank))
        self._layers = {r: _moe_layers(spec, stage_at(plan, locate(plan, r))) for r in plan.ranks}
        own_layers = self._layers[comm.rank]
        self.group = comm.group(sequence_group(stage, comm.rank) if own_layers else (comm.rank,))
        self._load = torch.zeros(len(own_layers), self.moe.num_experts, dtype=torch.int64, device=comm.device)
        self._losses = torch.zeros(2, dtype=wide(dtype), device=comm.device)
        for number, mlp in enumerate(x.mlp for x in model.layers() if isinstance(x.mlp, MoEMLP)):
            mlp.gate.observe = partial(self._observe, number)

    def begin(self, seed: float) -> None:
        """A step begins."""
        self.seed = seed
        self._load.zero_()
        self._losses.zero_()

    def _observe(
        self, layer: int, weights: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, rows: int,
        counted: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        return _Observed.apply(weights, logits, experts, self, layer, rows, counted)  # type: ignore[no-any-return]

    def add(
        self, layer: int, logits: torch.Tensor, experts: torch.Tensor, rows: int, counted: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Count what the tokens [rows x tokens here] of a micro-batch chose; the gradient of the balancing losses with
        respect to ``logits``, None where there are none."""
        self._load[layer] += _occurrences(experts, self.moe.num_experts)
        options = self.balancing
        grads = []
        if options.sequence_loss:
            best_experts = _best(logits, experts, self.moe)
            counts = _counts(best_experts, self.moe.num_experts, rows, counted)
            value, grad = sequence_loss(logits, sum_of_ranks(counts, self.group), self.moe, self.seq_length)
            self._losses[0] += value
            grads.append(grad.mul_(options.sequence_loss))
        if options.z_loss:
            value, grad = z_loss(logits, counted)
            self._losses[1] += value
            grads.append(grad.mul_(options.z_loss))
        return sum(grads[1:], grads[0]).mul_(self.seed).to(logits.dtype) if grads else None

    @cached_property
    def width(self) -> int:
        """Numbers that :meth:`routing` wants to know of each rank: those of :meth:`counted`, and zeros."""
        return 2 + max(map(len, self._layers.values())) * self.moe.num_experts

    def counted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the two losses, the load of this rank's layers, one after the other), of the step so far."""
        return self._losses, self._load.flatten()

    def routing(self, rows: torch.Tensor, tokens: float) -> StepRouting:
        """``rows``: [ranks, n] of the plan's ranks; ``tokens``: of the step that count in the loss."""
        experts, load = self.moe.num_experts, dict[int, torch.Tensor]()
        counts = rows[:, 2:].to(torch.int64).unflatten(1, (-1, experts))  # [ranks, layers of a rank, experts]
        for layers, of_rank in zip(self._layers.values(), counts, strict=True):
            for layer, count in zip(layers, of_rank, strict=False):
                load[layer] = load[layer] + count if layer in load else count.clone()
        rank, expert, target = self._targets
        rank_rows = torch.zeros(len(self.plan.ranks), dtype=torch.int64)
        rank_rows.index_add_(0, target, counts.sum(1)[rank, expert])
        names = {"sequence loss": self.balancing.sequence_loss, "z-loss": self.balancing.z_loss}
        means = (rows[:, :2].sum(0) / (tokens * max(len(load), 1))).tolist()
        losses = {name: mean for (name, factor), mean in zip(names.items(), means, strict=True) if factor}
        return StepRouting(dict(sorted(load.items())), rank_rows, losses)

    @cached_property
    def _targets(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rank, expert, rank to which the first one sends its tokens for the expert), ranks by place in the plan."""
        place = {rank: i for i, rank in enumerate(self.plan.ranks)}
        targets = []
        for stage in (s for p in self.plan.pipelines for s in p.stages):
            for group in expert_groups(stage, self.moe.num_experts) if _moe_layers(self.spec, stage) else ():
                for rank in group.ranks:
                    to = destinations(group, rank, self.moe.num_experts, self.plan.islands)
                    targets += [(place[rank], e, place[t]) for e, ranks in enumerate(to) for t in ranks]
        columns = torch.tensor(targets, dtype=torch.int64).view(-1, 3).T
        return columns[0], columns[1], columns[2]

    @torch.no_grad()
    def move_bias(self, owned: Iterable[tuple[str, Box, torch.Tensor]], routing: StepRouting) -> None:
        """Move the owners' values of the routers' biases by the load of a step; of exact counts, so that the sign does
        not depend on the order of a sum."""
        if not self.balancing.bias_rate:
            return
        layers = {bias_name(layer): load for layer, load in routing.load.items()}
        for name, box, master in owned:
            if name in layers:
                load = layers[name]
                sign = (load.sum() - self.moe.num_experts * load).sign()
                master += sign[box.slices()].to(master.device, master.dtype) * self.balancing.bias_rate


def bias_name(layer: int) -> str:
    """Logical name of the bias of a layer's router."""
    return f"model.layers.{layer}.mlp.gate.e_score_correction_bias"


def _moe_layers(spec: ModelSpec, stage: Stage) -> tuple[int, ...]:
    return tuple(i for i in run_layers(spec, stage) if spec.layer(i).mlp == "moe")


class _Observed(torch.autograd.Function):
    """Passes the weights on; in backward, the balancing losses add to the gradient of the logits."""

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, balance: LoadBalance, layer: int,
        rows: int, counted: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(logits, experts)
        ctx.balance, ctx.layer, ctx.rows, ctx.counted = balance, layer, rows, counted
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        return grad, ctx.balance.add(ctx.layer, logits, experts, ctx.rows, ctx.counted), None, None, None, None, None


def _best(logits: torch.Tensor, experts: torch.Tensor, moe: MoE) -> torch.Tensor:
    """The experts of each token by their scores alone: what the sequence loss counts."""
    if not moe.score_bias and moe.top_groups == moe.groups:
        return experts
    return choose(scores_of(logits, moe.score), None, moe.top_k, 1, 1, 1)


def _occurrences(values: torch.Tensor, count: int) -> torch.Tensor:
    """[count] int64: how often each of 0, …, count - 1 occurs. ``torch.bincount`` needs to know values to tell shapes,
    and fake tensors have none."""
    flat = values.flatten()
    return flat.new_zeros(count).index_add_(0, flat, torch.ones_like(flat))


def _counts(chosen: torch.Tensor, experts: int, rows: int, counted: torch.Tensor | None) -> torch.Tensor:
    """[rows, experts + 1] int64: tokens here that have an expert among their best, and those that count in the loss."""
    tokens = chosen.shape[0] // rows if rows else 0
    slots = torch.arange(rows, device=chosen.device).repeat_interleave(tokens)[:, None] * experts + chosen
    load = _occurrences(slots, rows * experts).view(rows, experts)
    counted_tokens = load.new_full((rows, 1), tokens) if counted is None else counted.sum(1, keepdim=True)
    return torch.cat([load, counted_tokens], dim=1)


def sequence_loss(
    logits: torch.Tensor, counts: torch.Tensor, moe: MoE, seq_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's part of the sum over sequences of tokens that count times sequence loss [], its gradient with
    respect to ``logits`` in at least fp32); see ``Balancing``.

    Args:
        logits: [rows x tokens here, experts]; counts: as of :func:`_counts`, of all tokens of the sequences.
    """
    scores = scores_of(logits, "sigmoid" if moe.score == "sigmoid" else "softmax")
    total = scores.sum(-1, keepdim=True) + TINY if moe.score == "sigmoid" else None
    p = scores if total is None else scores / total
    load, counted_tokens = counts[:, :-1].to(p.dtype), counts[:, -1:].to(p.dtype)
    factor = load * counted_tokens * (moe.num_experts / (moe.top_k * seq_length**2))  # [rows, experts]
    rows = max(len(counts), 1)
    g = factor.repeat_interleave(p.shape[0] // rows, dim=0)
    value = (p * g).sum()
    g = g - (g * p).sum(-1, keepdim=True)
    return value, p * g if total is None else p * g * (1 - scores)


def z_loss(logits: torch.Tensor, counted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over the tokens that count of logsumexp(logits)^2 [], its gradient in at least fp32).

    Args:
        logits: [tokens, experts]; counted: as many, which ones count; None: all.
    """
    z = logits.to(wide(logits.dtype))
    lse = z.logsumexp(-1)
    weighted = lse if counted is None else lse * counted.flatten()
    return (weighted * lse).sum(), z.softmax(-1) * (2 * weighted)[:, None]
