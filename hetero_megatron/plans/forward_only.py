"""A second model that only runs forward beside the one that is trained: on ranks of its own, or on the same ones, cut
alike; and which weights go to one that is the trained model itself. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Piece, transfer
from hetero_megatron.plans.canonical import Interval, Pipeline, Plan, Recompute, Stage, Unit
from hetero_megatron.plans.canonical import Optimizer as OptimizerPlace
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.roles import GENERATOR, role_plan, score_transfer
from hetero_megatron.plans.validate import validate
from hetero_megatron.spec import trained_tensors
from hetero_megatron.spec.distillation import LOGITS_WORDS, likeliest_words, saying_words
from hetero_megatron.spec.flops import PLAIN_WORDS, Words

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class ForwardRole:
    """A model that only runs forward.

    Attributes:
        name: of its role; compiled: its plan.
        words: of 4 bytes that travel of each position, from its ranks to those of the loss; 0: it is on the same ranks,
            and its forward comes before each step.
        forwards: over each batch.
    """

    name: str
    compiled: CompiledPlan
    words: int = 0
    forwards: int = 1

    @property
    def apart(self) -> bool:
        """It has ranks of its own."""
        return self.words > 0 or self.name == GENERATOR

    @property
    def loss_words(self) -> tuple[Words, Words]:
        """``CostOptions.loss_words`` of the model that is trained, and of the role."""
        if self.name != "teacher":
            return PLAIN_WORDS, PLAIN_WORDS
        top_k = (self.words - 1) // 2
        return (likeliest_words(top_k), saying_words(top_k)) if self.apart else (LOGITS_WORDS, PLAIN_WORDS)

    def sends(self, plan: Plan) -> list[tuple[int, int, float]]:
        """(from rank, to rank, bytes) for a batch of the model that ``plan`` trains."""
        if not self.words:
            return []
        source, size = self.compiled.plan, 4.0 * self.words
        moves = score_transfer(source, plan, plan.global_batch_size, self.name == "reference")
        return [(piece.src, piece.dst, size * piece.box.size) for piece in moves.pieces]


def role_of(
    plan: Plan, spec: ModelSpec, name: str, model: ModelSpec, top_k: int, cluster: Cluster | None = None,
    forwards: int = 1,
) -> ForwardRole:  # fmt: skip
    """``model`` in a role beside ``spec``, which ``plan`` trains: on the ranks that it has for the role, else as
    :func:`plan_beside` has it.

    Args:
        top_k: likeliest tokens of a position that a teacher on its own ranks sends.
    """
    apart_plan = role_plan(plan, name)
    forward_plan = plan_beside(plan, spec, model, cluster) if apart_plan is None else apart_plan
    compiled = CompiledPlan(forward_plan, model, pairs=name == "reference")
    return ForwardRole(name, compiled, 0 if apart_plan is None else words_of(name, top_k), forwards)


def words_of(role: str, top_k: int) -> int:
    """Of 4 bytes, that a role on its own ranks sends of each position: of a teacher the ids of its likeliest tokens,
    their log-probabilities, and that of all others; of a reference the number of a pair or example, and two
    log-probabilities (``pipeline/role_scores.py``); of a generator none: its answers are few numbers."""
    if role == GENERATOR:
        return 0
    return 2 * top_k + 1 if role == "teacher" else 6


def plan_beside(plan: Plan, spec: ModelSpec, other: ModelSpec, cluster: Cluster | None = None) -> Plan:
    """``plan``, which is of ``spec``, for a model ``other`` that runs forward beside it: micro-batches, shares of
    tensors and tokens are the same, layers and heads in the same proportions. What only training needs is left out;
    weights are whole on each rank, and experts are divided as the plan has it where there are as many.

    Raises:
        UserError: the model cannot be cut so.
    """
    layers, heads = other.num_layers / spec.num_layers, other.num_heads / spec.num_heads
    same_experts = spec.moe is not None and other.moe is not None and spec.moe.num_experts == other.moe.num_experts

    def unit_of(unit: Unit) -> Unit:
        return replace(unit, heads=_scaled(unit.heads, heads))

    def stage_of(stage: Stage) -> Stage:
        return replace(
            stage, layers=tuple(_scaled(run, layers) for run in stage.layers), units=tuple(map(unit_of, stage.units)),
            recompute=Recompute(), optimizer=OptimizerPlace(), kernels=(), dtype=None, weights=None, activations=None,
            experts=stage.experts if same_experts else (),
        )  # fmt: skip

    def pipeline_of(pipeline: Pipeline) -> Pipeline:
        return replace(pipeline, stages=tuple(map(stage_of, pipeline.stages)))

    forward_plan = replace(plan, pipelines=tuple(map(pipeline_of, plan.pipelines)), outer=None)
    try:
        validate(forward_plan, other, cluster)
    except UserError as error:
        problem = f"the plan does not fit it: {error.problem}"
        accepted = "a model that can be cut as the student's plan says, or its log-probabilities in a file"
        raise UserError(problem, field=error.field, value=error.value, accepted=accepted) from None
    return forward_plan


def _scaled(interval: Interval, factor: float) -> Interval:
    return round(interval[0] * factor), round(interval[1] * factor)


def weight_moves(source: CompiledPlan, target: CompiledPlan) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """By logical name, in an order that is equal on all ranks. Among replicas the one sends that has sent least.

    Args:
        source, target: of the same model, on other ranks. Adapters' base does not move: it never changes.
    """
    sent = Counter[int]()
    for tensor in trained_tensors(source.spec):
        held, wanted = (compiled.holders[tensor.name] for compiled in (source, target))
        pieces = transfer(held, wanted, lambda holder, _: float(sent[holder])).pieces
        for piece in pieces:
            sent[piece.src] += piece.box.size
        yield tensor.name, pieces
