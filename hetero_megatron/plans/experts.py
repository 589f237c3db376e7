"""Which rank of a stage holds which experts: the spelling in plan files, and the shares of ranks.

    experts:
      - {ranks: [0, 1], experts: [[0, 24], [24, 32]]}          # one group of two ranks with unequal counts
      - {ranks: [[2, 3], 4], experts: [[0, 32], []], split: [[2, 1], [1]]}

An entry of ``ranks`` is a rank, or a list of ranks that share the columns of each of their experts, by the weights in
``split`` (default: evenly). Intervals may overlap: such experts are replicated, and tokens go to one of the replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut_in_tiles
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember, Interval, Plan, Stage
from hetero_megatron.plans.fields import Source, parse_ranks, reduced, stages
from hetero_megatron.plans.shares import (
    Islands,
    micro_batch_sizes,
    pipeline_samples,
    split_by_island,
    unit_sequences,
)
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hetero_megatron.spec import ModelSpec
    from hetero_megatron.spec.moe import MoE
    from hetero_megatron.utils.yaml_document import Entry

KEYS = ("ranks", "experts", "split")


def read_experts(entry: Entry) -> tuple[ExpertGroup, ...]:
    """The groups, by their first rank."""
    return tuple(sorted(map(_group, entry.items()), key=lambda group: min(group.ranks)))


def without_plain_experts(plan: Plan, spec: ModelSpec) -> Plan:
    """The plan without groups that say what holds without them, so that equal plans are spelled alike."""

    def stage(s: Stage) -> Stage:
        plain = spec.moe is not None and s.experts == expert_groups(replace(s, experts=()), spec.moe.num_experts)
        return replace(s, experts=()) if plain else s

    return plan.with_stages(stage) if any(s.experts for s in plan.stages) else plan


def _group(entry: Entry) -> ExpertGroup:
    keys = entry.mapping(KEYS, required=("ranks", "experts"))
    ranks = [parse_ranks(item) for item in keys["ranks"].items()] if isinstance(keys["ranks"].value, list) else [
        (rank,) for rank in parse_ranks(keys["ranks"])
    ]  # fmt: skip
    intervals = [_interval(item) for item in keys["experts"].items()]
    if len(intervals) != len(ranks):
        keys["experts"].fail(
            f"{plural(len(intervals), 'interval')} for {plural(len(ranks), 'entry of ranks', 'entries of ranks')}",
            accepted="one per entry of ranks",
        )
    splits = [(1,) * len(member) for member in ranks]
    if "split" in keys:
        splits = [item.integers(1) for item in keys["split"].items()]
        if [len(s) for s in splits] != [len(member) for member in ranks]:
            keys["split"].fail("it does not match ranks", accepted="a list of weights per entry of ranks, one per rank")
    return ExpertGroup(
        tuple(ExpertMember(r, e, reduced(s)) for r, e, s in zip(ranks, intervals, splits, strict=True))
    )


def _interval(entry: Entry) -> Interval:
    pair = entry.integers(0) if entry.items() else (0, 0)
    if len(pair) != 2 or pair[0] > pair[1]:
        entry.fail("not an interval of experts", accepted="[first, end] with end excluded, or []")
    return (pair[0], pair[1]) if pair[0] < pair[1] else (0, 0)


def expert_groups(stage: Stage, num_experts: int) -> tuple[ExpertGroup, ...]:
    """The groups in which routed tokens travel."""
    all_experts = (0, num_experts)
    plain = [ExpertGroup((ExpertMember(unit.ranks, all_experts, unit.tp_split),)) for unit in stage.units]
    return stage.experts or tuple(sorted(plain, key=lambda group: min(group.ranks)))


@lru_cache(maxsize=4096)
def destinations(
    group: ExpertGroup, rank: int, num_experts: int, islands: Islands = ()
) -> tuple[tuple[int, ...], ...]:
    """For each expert the ranks of ``group`` to which ``rank`` sends its tokens: those of a member that has the expert,
    the own one if it has it, else one inside the own island, else one that is fixed for each sender so that replicas
    share the work."""
    order = sorted(group.ranks).index(rank)
    island = next((set(ranks) for ranks in islands if rank in ranks), {rank})
    receivers = []
    for expert in range(num_experts):
        holders = [m for m in group.members if m.experts[0] <= expert < m.experts[1]]
        own_members = [m for m in holders if rank in m.ranks]
        inside = own_members or [m for m in holders if island.issuperset(m.ranks)]
        candidates = inside or holders
        receivers.append(candidates[0 if own_members else order % len(candidates)].ranks)
    return tuple(receivers)


def replicated_experts(stage: Stage) -> list[int]:
    """Experts that several members of one of its groups hold, ascending."""
    replicated = set[int]()
    for group in stage.experts:
        holder_counts = Counter(e for member in group.members for e in range(*member.experts))
        replicated |= {expert for expert, holders in holder_counts.items() if holders > 1}
    return sorted(replicated)


def sequence_group(stage: Stage, rank: int) -> tuple[int, ...]:
    """The ranks of a stage that have tokens of the same sequences as ``rank``, ascending."""
    own_sequences = next(unit.sequences for unit in stage.units if rank in unit.ranks)
    return tuple(sorted(r for unit in stage.units if unit.sequences == own_sequences for r in unit.ranks))


def require_rows(plan: Plan, batch_size: int) -> None:
    """Refuse a batch in which a rank of an expert group has no sequences: the others would wait for its tokens.

    Raises:
        UserError: on all ranks alike.
    """
    for p, (pipeline, (start, stop)) in enumerate(zip(plan.pipelines, pipeline_samples(plan, batch_size), strict=True)):
        for s, stage in enumerate(pipeline.stages):
            shared = any(len({u.sequences for u in stage.units if {*u.ranks} & {*g.ranks}}) > 1 for g in stage.experts)
            for size in set(micro_batch_sizes(pipeline, stop - start)) if shared else ():
                if any(a == b for a, b in unit_sequences(stage, size)):
                    raise UserError(
                        f"a micro-batch of {plural(size, 'sequence')} leaves a replica that shares experts without any",
                        field=f"pipelines[{p}].stages[{s}].experts", value=f"a batch of {batch_size}",
                        accepted="batches of whole micro-batches, or expert groups inside one replica",
                    )  # fmt: skip


def has_experts(spec: ModelSpec, stage: Stage) -> bool:
    """Whether some layer of the stage is a mixture of experts."""
    return any(spec.layer(i).mlp == "moe" for i in run_layers(spec, stage))


WORTH_A_HOP = 1 / 16  # of what crosses between islands must be saved by a second hop, or its messages are not worth it


@dataclass(frozen=True)
class TokenHops:
    """The two hops of one group.

    Attributes:
        islands: the group's ranks by island, ascending in each.
    """

    islands: Islands

    def island(self, rank: int) -> tuple[int, ...]:
        """The island of a rank of the group."""
        return next(ranks for ranks in self.islands if rank in ranks)

    def relay(self, sender: int, island: tuple[int, ...]) -> int:
        """The rank of ``island`` to which ``sender`` sends tokens for it: itself in its own; in another one, the ranks
        of which take turns over the senders outside, so that equal nodes exchange between ranks of equal number."""
        if sender in island:
            return sender
        outside = sorted(rank for ranks in self.islands if ranks != island for rank in ranks)
        return island[outside.index(sender) % len(island)]

    def relays(self, sender: int) -> dict[int, tuple[int, ...]]:
        """Relay -> its island, for every island of the group."""
        return {self.relay(sender, island): island for island in self.islands}


def token_hops(moe: MoE, group: ExpertGroup, islands: Islands) -> TokenHops | None:
    """Two hops where they save at least 1/16 of the tokens that are expected between the islands with even routing;
    None: straight."""
    return _token_hops(group, islands, moe.num_experts, moe.top_k)


@lru_cache(maxsize=4096)
def _token_hops(group: ExpertGroup, islands: Islands, num_experts: int, top_k: int) -> TokenHops | None:
    group_islands = split_by_island(islands, group.ranks)
    if not islands or len(group_islands) == 1 or len(group_islands) == len(group.ranks):
        return None
    straight = once = 0.0
    popularity = (1 / num_experts,) * num_experts
    for source in group.ranks:
        to = destinations(group, source, num_experts, islands)
        for island in (island for island in group_islands if source not in island):
            per_rank = shares_of(popularity, to, island)
            straight += sum(hit_probability(share, num_experts, top_k) for share in per_rank.values())
            once += hit_probability(share_of_island(popularity, to, island), num_experts, top_k)
    return TokenHops(group_islands) if once < (1 - WORTH_A_HOP) * straight else None


def stage_token_hops(spec: ModelSpec, stage: Stage, islands: Islands) -> dict[ExpertGroup, TokenHops]:
    """Of the groups that the stage lists, those whose tokens go in two hops."""
    moe = spec.moe
    hops_of = {group: token_hops(moe, group, islands) for group in stage.experts} if moe is not None else {}
    return {group: hops for group, hops in hops_of.items() if hops is not None}


def routing_groups(spec: ModelSpec, stage: Stage, islands: Islands) -> list[tuple[int, ...]]:
    """Groups of several ranks that exchange routed tokens and are no TP group, ascending ranks in each; those of the
    second hop after the group of the first one, in the order in which they meet."""
    hops, groups = stage_token_hops(spec, stage, islands), []
    for group in stage.experts:
        inner = hops[group].islands if group in hops else ()
        groups += [ranks for ranks in (tuple(sorted(group.ranks)), *inner) if len(ranks) > 1]
    return groups


def shares_of(
    popular: Sequence[float], to: Sequence[Iterable[int]], ranks: Iterable[int]
) -> Mapping[int, float]:
    """By rank of ``ranks``, the popularity of the experts for which tokens go ``to`` it; those without are left out."""
    shares: dict[int, float] = defaultdict(float)
    wanted_ranks = set(ranks)
    for share, receivers in zip(popular, to, strict=True):
        for rank in wanted_ranks.intersection(receivers):
            shares[rank] += share
    return shares


def share_of_island(popular: Sequence[float], to: Sequence[Iterable[int]], island: Iterable[int]) -> float:
    """The popularity of the experts for which tokens go to some rank of an island."""
    island_ranks = set(island)
    return sum(share for share, receivers in zip(popular, to, strict=True) if island_ranks.intersection(receivers))


def hit_probability(share: float, experts: int, top_k: int) -> float:
    """That at least one of a token's ``top_k`` different experts is among some that get ``share`` of all routed tokens:
    as if they were ``share * experts`` equally popular ones."""
    miss = 1.0
    for i in range(top_k):
        miss *= max(0.0, 1.0 - share * experts / (experts - i)) if share < 1.0 else 0.0
    return 1.0 - miss


def experts_are_held(plan: Plan, spec: ModelSpec, source: Source) -> None:
    for path, _, stage in stages(plan):
        if not stage.experts:
            continue
        field, moe = f"{path}.experts", spec.moe
        if moe is None:
            value = [list(group.ranks) for group in stage.experts]
            raise source.error("the model has no mixture-of-experts layers", field, value, "a plan without experts")
        ranks = [rank for group in stage.experts for rank in group.ranks]
        if sorted(ranks) != sorted(stage.ranks):
            raise source.error(
                "the groups do not contain each rank of the stage once", field, sorted(ranks),
                f"the ranks {sorted(stage.ranks)}; a rank without experts has []",
            )  # fmt: skip
        for g, group in enumerate(stage.experts):
            intervals = sorted(member.experts for member in group.members)
            end = 0
            for a, b in intervals:
                if b > moe.num_experts:
                    count = plural(moe.num_experts, "expert")
                    raise source.error(f"the model has {count}", f"{field}[{g}].experts", [a, b])
                if a > end:
                    break
                end = max(end, b)
            if end < moe.num_experts:
                raise source.error(
                    f"no rank of the group holds expert {end}", f"{field}[{g}].experts", [list(e) for e in intervals],
                    f"intervals that cover [0, {moe.num_experts}]; they may overlap",
                )  # fmt: skip
            for member in group.members:
                if any(a == b for a, b in cut_in_tiles(moe.ffn_hidden_size, member.split)):
                    raise source.error(
                        f"gives a rank none of the {moe.ffn_hidden_size} columns of each expert",
                        f"{field}[{g}].split", list(member.split), "weights that leave every rank at least one column",
                    )  # fmt: skip


def run_layers(spec: ModelSpec, stage: Stage) -> tuple[int, ...]:
    """Numbers of the layers that a stage runs: its own, then those of its modules."""
    return (*stage.layer_indices(), *(spec.predictions if stage.head else ()))
