"""The canonical plan: what every spelling expands to, and the only thing that the runtime sees.

Terms: a *pipeline* is one data-parallel replica, cut into *stages*; a stage is a list of *units*; a
unit is one tensor-parallel group, which owns a box of the micro-batch's (sequence, token) space. All
intervals are half-open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from hetero_megatron.plans.made_for import MadeFor

Interval = tuple[int, int]

VERSION = 1
STAGE_DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8")
GATHERS = ("layer", "micro-batch", "step")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "adaptive")


@dataclass(frozen=True)
class Unit:
    """One tensor-parallel group.

    Args:
        ranks: its ranks, in the order of their tensor-parallel index.
        tp_split: one positive integer weight per rank, without a common divisor.
        sequences: rows of the nominal micro-batch that it computes.
        tokens: intervals of every sequence that it owns, ascending; the whole sequence without context
            parallelism.
        heads: query heads that it computes inside its context group; all of them without context parallelism.
        group: index of its context group in the stage.
    """

    ranks: tuple[int, ...]
    tp_split: tuple[int, ...]
    sequences: Interval
    tokens: tuple[Interval, ...]
    heads: Interval
    group: int = 0

    @property
    def tp(self) -> int:
        return len(self.ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence that this unit owns."""
        return sum(b - a for a, b in self.tokens)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the nominal micro-batch that this unit owns."""
        return (self.sequences[1] - self.sequences[0]) * self.num_tokens


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in backward: ``none``, ``selective`` (attention only), ``elementwise`` (outputs
    of norms and activations), ``full`` (every layer), or ``first`` (the first ``layers`` decoder layers of the stage,
    whole)."""

    kind: str = "none"
    layers: int = 0

    def __str__(self) -> str:
        return f"first {self.layers}" if self.kind == "first" else self.kind

    def whole(self, layers: int) -> int:
        """How many of a stage's ``layers`` are recomputed whole: the first ones."""
        return {"full": layers, "first": self.layers}.get(self.kind, 0)


@dataclass(frozen=True)
class Optimizer:
    """Where a stage keeps its optimizer: ``offload`` to host memory; ``share``: how much of the optimizer state each of
    its ranks owns, relative to other holders of the same tensors."""

    offload: bool = False
    share: int = 1


@dataclass(frozen=True)
class WeightSharding:
    """How the ranks of a stage that hold the same weights keep them between uses: each its own rows.

    Args:
        shard: what each rank of the stage keeps of weights, gradients and optimizer, relative to the others.
        gather: for how long weights are whole: ``step`` from the first forward to the last backward, ``micro-batch``
            in a forward or backward of a chunk, ``layer`` in that of one layer.
        reshard_after_forward: they are given up between a micro-batch's forward and its backward, too.
    """

    shard: tuple[int, ...]
    gather: str = "layer"
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class ActivationOffload:
    """What a stage keeps in host memory from a layer's forward to its backward: all that its first ``layers`` decoder
    layers save, but weights and what other layers share; ``ahead``: layers whose copies are under way at once."""

    layers: int
    ahead: int = 1


@dataclass(frozen=True)
class KeyValues:
    """How keys and values travel between context groups: transport, and tokens per block (0: one block)."""

    transport: str = "ring"
    block: int = 0


@dataclass(frozen=True)
class ExpertMember:
    """Ranks that hold the experts ``[a, b)`` of every mixture-of-experts layer of a stage; several ranks share the
    columns of each expert by the weights ``split`` (expert tensor parallelism). An empty interval: no experts."""

    ranks: tuple[int, ...]
    experts: Interval
    split: tuple[int, ...]


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that exchange routed tokens: together they hold every expert, some perhaps several times."""

    members: tuple[ExpertMember, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for member in self.members for rank in member.ranks)


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one mesh of ranks.

    Args:
        layers: layer ranges, ascending; several are virtual chunks, of which some may be empty; none is a stage without
            decoder layers.
        units: ordered by inner data-parallel replica, then context member.
        embed, head: whether it holds the input embedding, and the final norm, output head and loss.
        chip: name of the chip that its ranks must be, checked at start; None: any.
        kernels: (operator, provider) pairs, sorted.
        dtype: what its linear modules compute in: ``fp8``, or that of the weights; None: as the run says.
        weights: how they are divided over ranks that hold the same; None: each has all that it computes with.
        activations: which of them are in host memory before backward needs them; None: none.
        experts: groups that divide the experts and tile the stage's ranks; empty: every unit is a group, whose ranks
            share the columns of every expert as they do those of a dense MLP.
    """

    layers: tuple[Interval, ...]
    units: tuple[Unit, ...]
    embed: bool
    head: bool
    recompute: Recompute = Recompute()
    chip: str | None = None
    optimizer: Optimizer = Optimizer()
    kernels: tuple[tuple[str, str], ...] = ()
    kv: KeyValues | None = None
    experts: tuple[ExpertGroup, ...] = ()
    dtype: str | None = None
    weights: WeightSharding | None = None
    activations: ActivationOffload | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks: TP fastest, then context member, then inner data parallel."""
        return tuple(rank for unit in self.units for rank in unit.ranks)

    def on_ranks(self, number: Callable[[int], int]) -> Stage:
        """The same stage with rank ``number(r)`` where it has r."""

        def moved(ranks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(map(number, ranks))

        units = tuple(replace(unit, ranks=moved(unit.ranks)) for unit in self.units)
        groups = tuple(
            replace(group, members=tuple(replace(m, ranks=moved(m.ranks)) for m in group.members))
            for group in self.experts
        )
        return replace(self, units=units, experts=groups)

    def layer_indices(self) -> tuple[int, ...]:
        return tuple(i for a, b in self.layers for i in range(a, b))

    @property
    def num_layers(self) -> int:
        return sum(b - a for a, b in self.layers)

    @property
    def recomputed(self) -> int:
        """Layers that are recomputed whole."""
        return self.recompute.whole(self.num_layers)

    @property
    def chunks(self) -> tuple[Interval, ...]:
        """Layers that a micro-batch passes at once: its ranges, or one without layers."""
        return self.layers or ((0, 0),)

    @property
    def replicas(self) -> tuple[Interval, ...]:
        """The distinct sequence intervals of its units: one per inner data-parallel replica."""
        return tuple(dict.fromkeys(unit.sequences for unit in self.units))

    @property
    def dp_split(self) -> tuple[int, ...]:
        """Sequences of the nominal micro-batch per inner data-parallel replica."""
        return tuple(b - a for a, b in self.replicas)


@dataclass(frozen=True)
class Pipeline:
    """One replica of the model: micro-batches of ``micro_batch_size`` sequences, ``num_micro_batches``
    of them a step. ``orders``: per stage its actions in order, as ``schedule.stored`` spells them, with ``schedule:
    adaptive``; empty: 1F1B, or with several chunks interleaved 1F1B. ``in_flight``: per stage, the most micro-batches
    that it holds at once under zero-bubble (one in one of v chunks counts 1 / v); empty: as many as there are stages.
    """

    micro_batch_size: int
    num_micro_batches: int
    stages: tuple[Stage, ...]
    orders: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def chunks(self) -> int:
        """Runs of layers that each of its stages holds; a micro-batch passes the first of all stages, then the second
        of all stages, and so on."""
        return len(self.stages[0].chunks)

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step, at the nominal global batch size."""
        return self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class Outer:
    """Outer steps: islands that train apart, and agree on weights now and then (DiLoCo; streaming, by fragments).

    Args:
        islands: the ranks of each, ascending; every pipeline lies in one.
        every: optimizer steps in which each tensor is exchanged once.
        fragments: sets of layers, of which one is exchanged every ``every / fragments`` steps, in turn.
        delay: steps for which an exchange is under way beside the computing.
        mixing: how much of an island's own weights stays: 0, they become the global ones; 1, they stay as they are.
        lr, momentum, nesterov: of the SGD that moves the global weights.
        compress: in what form differences travel, with error feedback: ``none``, ``bf16``, ``int8`` or ``int4``.
    """

    islands: tuple[tuple[int, ...], ...]
    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    compress: str = "none"

    @property
    def compressed(self) -> bool:
        """Whether differences are rounded, and what was lost is kept."""
        return self.compress != "none"

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return self.every // self.fragments

    def island(self, rank: int) -> int:
        """Index of the island of a rank."""
        return next(i for i, ranks in enumerate(self.islands) if rank in ranks)


@dataclass(frozen=True)
class Place:
    """Where a rank stands: indices of its pipeline, of the stage in it, of the unit in that, and in the
    TP group."""

    pipeline: int
    stage: int
    unit: int
    tp_rank: int


@dataclass(frozen=True)
class Plan:
    """Which ranks hold which layers, heads, tokens and sequences. ``global_batch_size`` is in sequences
    per step; ``islands``: groups of ranks with slower links between them, over which gradients, parameters and routed
    tokens go in two hops where that saves bytes (a rank in none is one by itself). ``outer``: gradients are summed
    inside its islands only. ``roles``: by name, the plan of a model that only runs forward, on ranks of its own."""

    seq_length: int
    global_batch_size: int
    schedule: str
    pipelines: tuple[Pipeline, ...]
    islands: tuple[tuple[int, ...], ...] = ()
    outer: Outer | None = None
    roles: tuple[tuple[str, Plan], ...] = ()
    allow_bridge: bool = field(default=False, compare=False)  # TP and context groups may cross backend islands
    made_for: MadeFor | None = field(default=None, compare=False)  # no part of its meaning, nor of the fingerprint

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline.ranks))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def dtypes(self) -> frozenset[str]:
        """What stages say that they compute in."""
        return frozenset(stage.dtype for stage in self.stages if stage.dtype is not None)

    def with_stages(self, change: Callable[[Stage], Stage]) -> Plan:
        """The plan with every stage changed."""
        return replace(self, pipelines=tuple(replace(p, stages=tuple(map(change, p.stages))) for p in self.pipelines))

    @cached_property
    def offloading(self) -> frozenset[int]:
        """Ranks whose optimizer is in host memory."""
        return frozenset(rank for stage in self.stages if stage.optimizer.offload for rank in stage.ranks)

    @cached_property
    def sharding_stages(self) -> Mapping[int, Stage]:
        """By rank, its stage, of stages that divide their weights."""
        return {rank: stage for stage in self.stages if stage.weights is not None for rank in stage.ranks}

    @cached_property
    def places(self) -> Mapping[int, Place]:
        """Where every rank stands."""
        return {
            rank: Place(p, s, u, t)
            for p, pipeline in enumerate(self.pipelines)
            for s, stage in enumerate(pipeline.stages)
            for u, unit in enumerate(stage.units)
            for t, rank in enumerate(unit.ranks)
        }

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def fingerprint(self) -> str:
        """16 hex digits that depend on the meaning of the plan only: equal plans, however spelled, agree."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        text = json.dumps(self.canonical_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def canonical_json(self) -> Mapping[str, Any]:
        """What the plan means as JSON data, one entry per dataclass field.

        Islands are left out. They say on which way gradients and tokens travel, not who computes, holds or owns what:
        a checkpoint is read alike with others, and one file is one plan, with the islands of a cluster file and
        without.
        """
        return {
            "version": VERSION,
            "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size,
            "schedule": self.schedule,
            "pipelines": [_pipeline_json(pipeline) for pipeline in self.pipelines],
            **({"outer": _outer_json(self.outer)} if self.outer is not None else {}),
            **({"roles": {n: p.canonical_json()["pipelines"] for n, p in self.roles}} if self.roles else {}),
        }


def _outer_json(outer: Outer) -> dict[str, Any]:
    return {key: value for key, value in asdict(outer).items() if key != "compress" or outer.compressed}


def _pipeline_json(pipeline: Pipeline) -> dict[str, Any]:
    fields = {key: value for key, value in asdict(pipeline).items() if value or key not in ("orders", "in_flight")}
    for stage in fields["stages"]:
        for key in ("experts", "dtype", "weights", "activations"):
            if not stage[key]:
                del stage[key]
        stage["optimizer"]["shard_weights"] = False  # a key of every fingerprint, by which checkpoints know their plan
    return fields
