"""The context scheduler's input: members with speeds and memory, links, one stage of a model; and its answer, layouts,
as stages of plans.

A *member* is one rank, or one tensor-parallel group that acts as one. Members own tokens of every sequence; inside
attention, the members of a *context group* divide the query heads of the tokens that the group owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_megatron.errors import UserError
from hetero_megatron.plans import Pipeline, Plan, Stage
from hetero_megatron.plans.canonical import KeyValues, Recompute, Unit
from hetero_megatron.plans.shares import nested_zigzag
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import delta_flops, layer_matmul_flops, mean_attention_pairs

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class ContextMember:
    """One context member.

    Args:
        ranks: its ranks; several form a TP group, whose speeds and memory are given as sums.
        node: index of its node; kind: index of its node group, a row of the fabric's tables.
        gemm_flops, attention_flops: achieved FLOP/s.
        memory: bytes for states, activations and buffers.
        token_seconds: seconds per token and layer of TP collectives, in forward and again in backward.
        layer_seconds, layer_backward_seconds: least seconds per layer (kernel launches).
        attention_backward: time of attention's backward over its forward (5 products against 2).
        message_seconds: host seconds per message.
        visit, visit_backward: (seconds, seconds per query and head) per block of keys besides its FLOPs.
    """

    ranks: tuple[int, ...]
    node: int
    kind: int
    gemm_flops: float
    attention_flops: float
    memory: float
    token_seconds: float = 0.0
    layer_seconds: float = 0.0
    layer_backward_seconds: float = 0.0
    attention_backward: float = 2.5
    message_seconds: float = 0.0
    visit: tuple[float, float] = (0.0, 0.0)
    visit_backward: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Fabric:
    """Links as (alpha seconds, beta seconds per byte), one direction.

    Args:
        intra: per kind, inside a node, for each member.
        inter: per pair of kinds, between nodes.
        shared: an ``inter`` link is that of all network cards of a node, shared by its members; False: each member has
            its own card.
    """

    intra: tuple[tuple[float, float], ...]
    inter: tuple[tuple[tuple[float, float], ...], ...]
    shared: bool = True


@dataclass(frozen=True)
class ContextOptions:
    """How the stage runs.

    Args:
        layers: decoder layers of the stage (None: all of the model).
        embed, head: the stage has the embedding; the output head and loss.
        replicas: pipelines that hold these layers and share the optimizer states.
        recompute: none | selective | full; full also repeats forward's communication.
        item: bytes of an activation.
        token_unit: granularity of token shares (0: chosen by length).
        micro_batch: sequences per micro-batch.
        in_flight: micro-batches whose activations are alive at once.
        shard_states: weights and gradients are also divided over the members (ZeRO-3 / FSDP), gathered per layer.
        loss_chunk: tokens whose logits exist at one time.
    """

    layers: int | None = None
    embed: bool = True
    head: bool = True
    replicas: int = 1
    recompute: str = "full"
    item: int = 2
    token_unit: int = 0
    micro_batch: int = 1
    in_flight: int = 1
    shard_states: bool = False
    loss_chunk: int = 1024

    @property
    def wide(self) -> int:
        """Bytes of an accumulated gradient."""
        return max(self.item, 4)

    @property
    def forwards(self) -> float:
        """How often a layer's forward runs."""
        return 2.0 if self.recompute == "full" else 1.0

    @property
    def core_again(self) -> float:
        """How often the attention core alone runs again before its backward."""
        return 1.0 if self.recompute == "selective" else 0.0


@dataclass(frozen=True)
class ContextProblem:
    """One stage of ``model`` on ``members``, for sequences of ``seq_length`` tokens.

    Raises:
        UserError: no members, ranks used twice, unknown options, members without speed.
    """

    model: ModelSpec
    seq_length: int
    members: tuple[ContextMember, ...]
    fabric: Fabric
    options: ContextOptions = field(default_factory=ContextOptions)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def layers(self) -> int:
        return self.model.num_layers if self.options.layers is None else self.options.layers

    @property
    def unit(self) -> int:
        """Granularity of token shares: 128 where that is fine enough, else a smaller power of two."""
        if self.options.token_unit:
            return self.options.token_unit
        unit = 128
        while unit > 1 and self.seq_length < 64 * unit * len(self.members):
            unit //= 2
        return unit

    @property
    def linear_flops(self) -> float:
        """Forward FLOPs per token and layer of projections and MLP."""
        return layer_matmul_flops(self.model) * self.options.micro_batch

    @property
    def carried_flops(self) -> float:
        """The same on top, of linear attention whose states come from other members: further features of its values,
        as many as keys have."""
        delta = self.model.delta
        if delta is None or len(self.members) == 1:
            return 0.0
        return delta_flops(self.model) * delta.further_width / delta.value_dim * self.options.micro_batch

    @property
    def head_flops(self) -> int:
        """Forward FLOPs per token of the output head; 0 where the stage has none."""
        rows = self.options.micro_batch if self.options.head else 0
        return 2 * self.model.hidden_size * self.model.vocab_size * rows

    @property
    def pair_flops(self) -> float:
        """Forward attention FLOPs per query head and token, averaged over the sequence. Under nested zigzag every share
        of the tokens, however uneven, sees the average number of keys: causal work between shards i and j is s_i s_j /
        2."""
        pairs = mean_attention_pairs(self.model, self.seq_length) / self.seq_length
        return 4.0 * self.model.head_dim * pairs * self.options.micro_batch


def _check(problem: ContextProblem) -> None:
    options, kinds = problem.options, len(problem.fabric.intra)
    if not problem.members:
        raise UserError("context parallelism needs a rank", field="ranks", value=[], accepted="at least one rank")
    ranks = [rank for member in problem.members for rank in member.ranks]
    if len(set(ranks)) < len(ranks) or not all(member.ranks for member in problem.members):
        raise UserError("every member has ranks of its own", field="ranks", value=ranks, accepted="each rank once")
    if problem.seq_length < 1:
        raise UserError("a sequence has a token", field="seq_length", value=problem.seq_length, accepted="1 or more")
    if options.recompute not in RECOMPUTE:
        raise UserError("unknown recompute", field="recompute", value=options.recompute, accepted=" | ".join(RECOMPUTE))
    for member in problem.members:
        if member.gemm_flops <= 0 or member.attention_flops <= 0:
            raise UserError("a member has no speed", field="members", value=member.ranks, accepted="FLOP/s above 0")
        assert 0 <= member.kind < kinds, f"kind {member.kind} of {kinds}"


@dataclass(frozen=True)
class MemberGroup:
    """A context group: member indices, tokens of each sequence and query heads per member; heads sum to the model's."""

    members: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class ContextLayout:
    """Groups in ring order; ``transport`` between them: ring, or a2a for a single group; ``block`` in tokens."""

    groups: tuple[MemberGroup, ...]
    transport: str
    block: int = 0
    name: str = ""


def plan_stage(
    problem: ContextProblem, layout: ContextLayout, first_layer: int = 0, ranks: Mapping[int, int] | None = None
) -> Stage:
    """The stage of a plan, for micro-batches of one size; ``ranks``: which take the place of the problem's."""
    units, size = [], problem.options.micro_batch
    tokens = nested_zigzag([group.tokens for group in layout.groups])
    for g, group in enumerate(layout.groups):
        first = 0
        for m, ranges, heads in zip(group.members, tokens[g], group.heads, strict=True):
            of_member = problem.members[m].ranks
            ranks_of_unit = of_member if ranks is None else tuple(ranks[r] for r in of_member)
            units.append(
                Unit(ranks_of_unit, (1,) * len(ranks_of_unit), (0, size), ranges, (first, first + heads), group=g)
            )
            first += heads
    kv = KeyValues(layout.transport, layout.block) if len(layout.groups) > 1 else None
    layers, options = (first_layer, first_layer + problem.layers), problem.options
    return Stage((layers,), tuple(units), options.embed, options.head, Recompute(options.recompute), kv=kv)


def one_stage_plan(problem: ContextProblem, layout: ContextLayout, global_batch_size: int) -> Plan:
    """The plan of a single stage that holds the whole model.

    Raises:
        UserError: the stage is not the whole model, or the batch is not a multiple of the micro-batch.
    """
    size = problem.options.micro_batch
    if problem.layers != problem.model.num_layers:
        raise UserError(
            "a plan of one stage holds all layers", field="layers", value=problem.layers,
            accepted=str(problem.model.num_layers),
        )  # fmt: skip
    if global_batch_size < 1 or global_batch_size % size:
        raise UserError(
            f"not a multiple of the micro-batch of {size}", field="--global-batch-size", value=global_batch_size,
            accepted=f"a multiple of {size}",
        )  # fmt: skip
    pipeline = Pipeline(size, global_batch_size // size, (plan_stage(problem, layout),))
    return Plan(problem.seq_length, global_batch_size, "1f1b", (pipeline,))
