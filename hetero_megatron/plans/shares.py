"""Plan -> what one rank, one pipeline or one micro-batch gets: sequences, tokens, heads and columns.

For the runtime and for predictions alike; all shares are cut from the canonical plan by integer rules
(``layout/box.py``), so every rank computes the same ones without talking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout, cut, cut_in_tiles, largest_remainder
from hetero_megatron.plans.canonical import ExpertGroup, Interval, Pipeline, Place, Plan, Stage, Unit
from hetero_megatron.plans.fields import Source, nested_ranks, parse_ranks, stages, tp_splits
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec, Share
    from hetero_megatron.utils.yaml_document import Entry

Islands = tuple[tuple[int, ...], ...]


def locate(plan: Plan, rank: int) -> Place:
    """The place of one rank; KeyError for a rank that the plan does not use."""
    return plan.places[rank]


def stage_at(plan: Plan, place: Place) -> Stage:
    return plan.pipelines[place.pipeline].stages[place.stage]


def unit_at(plan: Plan, place: Place) -> Unit:
    return stage_at(plan, place).units[place.unit]


def has_context(stage: Stage, seq_length: int) -> bool:
    """Whether the units of a stage divide tokens or heads, not sequences only."""
    return any(unit.group or unit.tokens != ((0, seq_length),) for unit in stage.units)


def pipeline_shares(plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Sequences of a batch per pipeline: in proportion to the nominal shares, by largest remainder.

    Equals ``micro_batch_size * num_micro_batches`` when ``batch_size`` is the plan's global batch size.
    """
    return largest_remainder(batch_size, [p.batch_size for p in plan.pipelines])


def all_ranks(plan: Plan) -> tuple[int, ...]:
    """Those of the model that is trained and of all roles, ascending."""
    return tuple(sorted({*plan.ranks, *(rank for _, other in plan.roles for rank in other.ranks)}))


def idle_ranks(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """Ranks of the cluster that the plan leaves without work, to be reported."""
    return tuple(sorted(set(range(cluster.world_size)) - set(all_ranks(plan))))


def pipeline_samples(plan: Plan, batch_size: int) -> tuple[Interval, ...]:
    """The contiguous block of sample indices inside a batch that each pipeline computes."""
    bounds, start = [], 0
    for share in pipeline_shares(plan, batch_size):
        bounds.append((start, start + share))
        start += share
    return tuple(bounds)


def micro_batch_sizes(pipeline: Pipeline, share: int) -> tuple[int, ...]:
    """Sequences per micro-batch: the pipeline's micro-batch size each, a smaller last one for what is
    left."""
    full, remainder = divmod(share, pipeline.micro_batch_size)
    return (pipeline.micro_batch_size,) * full + ((remainder,) if remainder else ())


def unit_sequences(stage: Stage, size: int) -> tuple[Interval, ...]:
    """Per unit, the rows of a micro-batch of ``size`` sequences: cut by the stage's ``dp_split``; may
    be empty."""
    rows = dict(zip(stage.replicas, cut(size, stage.dp_split), strict=True))
    return tuple(rows[unit.sequences] for unit in stage.units)


def token_intervals(unit: Unit, tp_rank: int) -> tuple[Interval, ...]:
    """Tokens of each sequence that one TP rank of a unit holds between layers.

    Sequence parallelism: the unit's tokens, strung together in ascending order, are cut evenly over its
        ranks,
    whatever ``tp_split`` says.
    """
    start, stop = cut(unit.num_tokens, [1] * unit.tp)[tp_rank]
    intervals, offset = [], 0
    for a, b in unit.tokens:
        lo, hi = max(start, offset), min(stop, offset + b - a)
        if lo < hi:
            intervals.append((a + lo - offset, a + hi - offset))
        offset += b - a
    return tuple(intervals)


def head_micro_batches(plan: Plan, batch_size: int) -> Iterator[tuple[int, Unit, Interval]]:
    """(number in its pipeline, unit with a head, its samples of the batch, perhaps none) of all micro-batches."""
    for pipeline, (start, stop) in zip(plan.pipelines, pipeline_samples(plan, batch_size), strict=True):
        stage = next(stage for stage in pipeline.stages if stage.head)
        for number, size in enumerate(micro_batch_sizes(pipeline, stop - start)):
            for unit, (a, b) in zip(stage.units, unit_sequences(stage, size), strict=True):
                yield number, unit, (start + a, start + b)
            start += size


def activation_layout(plan: Plan, pipeline: int, stage: int, size: int, hidden: int) -> Layout:
    """Who holds what of a stage's activations, between layers and at its boundaries.

    Args:
        size: sequences in this micro-batch; may be smaller than the nominal one.
        hidden: hidden size of the model; never cut.

    Returns:
        a layout over (sequence, token, hidden) of shape ``(size, seq_length, hidden)`` that tiles it
        exactly once.
    """
    chosen = plan.pipelines[pipeline].stages[stage]
    boxes: dict[int, tuple[Box, ...]] = {}
    for unit, (row, end) in zip(chosen.units, unit_sequences(chosen, size), strict=True):
        for t, rank in enumerate(unit.ranks):
            boxes[rank] = tuple(Box((row, a, 0), (end, b, hidden)) for a, b in token_intervals(unit, t))
    return Layout((size, plan.seq_length, hidden), boxes)


GROUP_KEYS = ("ranks", "tokens", "heads", "intervals")
ORDERS = ("zigzag", "contiguous")


def context_units(
    keys: dict[str, Entry], seq_length: int, num_heads: int, micro_batch_size: int
) -> tuple[Unit, ...]:
    """The units of a stage with ``context`` groups; refuses sums that do not come out and ranks that
    differ."""
    entry = keys["context"]
    replicas, rows = [entry], [(0, micro_batch_size)]
    if "dp_split" in keys:
        replicas, rows = _replicas(entry, keys["dp_split"])
    groups = [
        [item.mapping(GROUP_KEYS, required=("ranks", "heads")) for item in replica.items()] for replica in replicas
    ]
    if not all(groups):
        entry.fail("no groups", accepted="at least one context group")
    members = [
        [nested_ranks(g["ranks"]) or [(rank,) for rank in parse_ranks(g["ranks"])] for g in row] for row in groups
    ]
    _check_ranks(keys["ranks"], [group for row in members for group in row])
    splits = tp_splits(keys.get("tp_split"), [ranks for row in members for group in row for ranks in group])
    units: list[Unit] = []
    for replica, group_keys, members_of_groups, sequences in zip(replicas, groups, members, rows, strict=True):
        tokens = _tokens(replica, group_keys, members_of_groups, keys.get("order"), seq_length)
        for g, group in enumerate(members_of_groups):
            heads = _counts(group_keys[g]["heads"], len(group))
            if sum(heads) != num_heads:
                group_keys[g]["heads"].fail(
                    f"the heads of a group sum to {sum(heads)}, the model has {plural(num_heads, 'query head')}"
                )
            first = 0
            for m, ranks in enumerate(group):
                share = (first, first + heads[m])
                units.append(Unit(ranks, splits[len(units)], sequences, tokens[g][m], share, group=g))
                first += heads[m]
    return tuple(units)


def _replicas(entry: Entry, split: Entry) -> tuple[list[Entry], list[Interval]]:
    """With ``dp_split``: one list of groups per inner replica, and the rows of the micro-batch that each computes."""
    weights, replicas = split.integers(1), entry.items()
    if len(weights) != len(replicas) or not all(isinstance(replica.value, list) for replica in replicas):
        entry.fail(
            f"with dp_split, there is one list of groups per inner replica, {len(weights)} of them",
            accepted="[[{ranks, tokens, heads}, ...], ...]",
        )
    rows, start = [], 0
    for weight in weights:
        rows.append((start, start + weight))
        start += weight
    return replicas, rows


def _check_ranks(entry: Entry, members: list[list[tuple[int, ...]]]) -> None:
    listed = parse_ranks(entry)
    used = tuple(rank for group in members for ranks in group for rank in ranks)
    if sorted(listed) != sorted(used):
        odd = sorted(set(listed) ^ set(used)) or sorted(used)
        entry.fail(
            f"the context groups do not use the same ranks, see {odd[:8]}", accepted="the ranks of all groups"
        )


def _counts(entry: Entry, members: int) -> tuple[int, ...]:
    counts = entry.integers(0)
    if len(counts) != members:
        entry.fail(_entries(len(counts), members), accepted=plural(members, "entry"))
    return counts


def _entries(count: int, members: int) -> str:
    return f"{plural(count, 'entry')} for {plural(members, 'member')}"


def _tokens(
    entry: Entry,
    groups: list[dict[str, Entry]],
    members: list[list[tuple[int, ...]]],
    order: Entry | None,
    seq_length: int,
) -> list[list[tuple[Interval, ...]]]:
    """Token intervals per group and member, from counts and an order, or as written."""
    written = [g for g in groups if "intervals" in g]
    if written:
        if len(written) < len(groups) or any("tokens" in g for g in groups) or order is not None:
            written[0]["intervals"].fail("intervals replace tokens and order, in all groups of the stage")
        return [_written(g["intervals"], len(m)) for g, m in zip(groups, members, strict=True)]
    for group, item in zip(groups, entry.items(), strict=True):
        if "tokens" not in group:
            item.fail("a context group says which tokens its members own", accepted="tokens: [n, ...]")
    counts = [_counts(g["tokens"], len(m)) for g, m in zip(groups, members, strict=True)]
    total = sum(map(sum, counts))
    if total != seq_length:
        groups[0]["tokens"].fail(f"the tokens of all groups sum to {total}, seq_length is {seq_length}")
    chosen = order.choice(ORDERS) if order is not None else "zigzag"
    return contiguous(counts) if chosen == "contiguous" else nested_zigzag(counts)


def _written(entry: Entry, members: int) -> list[tuple[Interval, ...]]:
    items = entry.items()
    if len(items) != members:
        entry.fail(_entries(len(items), members), accepted="one list of intervals per member")
    intervals = []
    for item in items:
        pairs = [pair.integers() for pair in item.items()]
        if any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs):
            item.fail("not a list of token intervals", accepted="[[first, end], ...] with end excluded")
        intervals.append(merged([(a, b) for a, b in pairs]))
    return intervals


def contiguous(counts: Sequence[Sequence[int]]) -> list[list[tuple[Interval, ...]]]:
    """One interval per member, groups and members in listed order."""
    intervals, start = [], 0
    for group in counts:
        row: list[tuple[Interval, ...]] = []
        for count in group:
            row.append(((start, start + count),) if count else ())
            start += count
        intervals.append(row)
    return intervals


def zigzag(counts: Sequence[int]) -> list[tuple[Interval, ...]]:
    """Each member takes a piece from the front and one from the back, so that causal work is even.

    Front pieces (the larger half) follow in listed order, back pieces in reverse order.
    """
    front, back, pieces = 0, sum(counts), []
    for count in counts:
        head, tail = count - count // 2, count // 2
        pieces.append(merged([(front, front + head), (back - tail, back)]))
        front, back = front + head, back - tail
    return pieces


def nested_zigzag(counts: Sequence[Sequence[int]]) -> list[list[tuple[Interval, ...]]]:
    """Zigzag over the groups, then over the members inside the tokens of each group."""
    intervals = []
    for group, group_tokens in zip(counts, zigzag([sum(group) for group in counts]), strict=True):
        intervals.append([tokens_at(group_tokens, pieces) for pieces in zigzag(group)])
    return intervals


def tokens_at(owned: tuple[Interval, ...], pieces: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """Intervals of the line that ``owned`` forms when strung together, as tokens."""
    tokens, offset = [], 0
    for a, b in owned:
        for lo, hi in pieces:
            start, stop = max(lo, offset), min(hi, offset + b - a)
            if start < stop:
                tokens.append((a + start - offset, a + stop - offset))
        offset += b - a
    return merged(tokens)


def merged(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Ascending, empty ones dropped, touching ones joined."""
    joined: list[Interval] = []
    for a, b in sorted(i for i in intervals if i[0] < i[1]):
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return tuple(joined)


def weights_can_be_split(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """``spec.shares`` knows how heads, ffn columns and vocabulary rows are cut, and what cannot be."""
    from hetero_megatron.spec import shares

    checked = set()
    for path, _, stage in stages(plan):
        for unit in stage.units:
            if unit.tp_split in checked:
                continue
            checked.add(unit.tp_split)
            try:
                shares(spec, unit.tp_split)
            except UserError as error:
                key = "tp" if len(set(unit.tp_split)) == 1 else "tp_split"
                value = unit.tp if key == "tp" else list(unit.tp_split)
                raise source.error(error.problem, f"{path}.{key}", value, error.accepted) from None


def owner_weights(plan: Plan) -> dict[int, float]:
    """By rank, how much it owns relative to other holders of the same tensors."""
    weights = {rank: float(s.optimizer.share) for s in plan.stages for rank in s.ranks}
    for stage in plan.stages:
        if stage.weights is not None:
            mean = sum(stage.weights.shard) / len(stage.ranks)
            for rank, share in zip(stage.ranks, stage.weights.shard, strict=True):
                weights[rank] *= share / mean
    return weights


def rank_shares(spec: ModelSpec, stage: Stage) -> Mapping[int, Share]:
    """What each rank of a stage holds of every cut axis."""
    return _rank_shares(spec, stage.units, stage.experts)


@lru_cache(maxsize=1024)
def _rank_shares(
    spec: ModelSpec, units: tuple[Unit, ...], experts: tuple[ExpertGroup, ...]
) -> Mapping[int, Share]:
    from hetero_megatron.spec import shares

    share_of = {
        rank: share for unit in units for rank, share in zip(unit.ranks, shares(spec, unit.tp_split), strict=True)
    }
    for member in (member for group in experts for member in group.members):
        assert spec.moe is not None
        columns = cut_in_tiles(spec.moe.ffn_hidden_size, member.split)
        for rank, columns_of_rank in zip(member.ranks, columns, strict=True):
            share_of[rank] = replace(share_of[rank], experts=member.experts, expert_ffn=columns_of_rank)
    return share_of


def split_by_island(islands: Islands, ranks: Iterable[int]) -> Islands:
    """``ranks`` by island; a rank that is in none is one by itself."""
    island = {rank: i for i, members in enumerate(islands) for rank in members}
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        groups[island.get(rank, -1 - rank)].append(rank)
    return tuple(sorted(tuple(members) for members in groups.values()))
