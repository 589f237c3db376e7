"""The context scheduler's members and links, from a cluster file and rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.cluster import Rank
from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.problem import ContextMember, ContextOptions, ContextProblem, Fabric
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES
from hetero_megatron.predictor.cost.operator_cost import Operators
from hetero_megatron.predictor.cost.rates import ChipRates, Rates, load_rates
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layer_attention_flops, layer_matmul_flops, mean_attention_pairs

MARGIN = 0.06  # share of a chip's memory kept free for fragmentation and workspaces, as in CostOptions


def problem_from_cluster(
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    ranks: Sequence[int] | None = None,
    tp: int = 1,
    dtype: str = "bf16",
    options: ContextOptions | None = None,
    rates: Rates | None = None,
    cards_shared: bool = True,
    margin: float = MARGIN,
) -> ContextProblem:
    """The scheduling problem of one stage on ``ranks`` of a cluster (None: all).

    Args:
        tp: ranks per member, in one node.
        options: ``item`` is overwritten according to ``dtype``.
        rates: of the cluster in ``dtype``; None: from the cluster file, or data sheets x default efficiencies.
        cards_shared: bandwidths between nodes are those of all network cards of a node together (as the planner reads
            cluster files); False: of each chip.
        margin: share of a chip's memory kept free.

    Raises:
        UserError: unknown ranks, a dtype that a chip lacks, TP groups that cross nodes, unknown links.
    """
    chosen = list(range(cluster.world_size)) if ranks is None else list(ranks)
    _check_ranks(cluster, chosen, dtype)
    rates = load_rates(cluster, dtype) if rates is None else rates
    groups = [group.name for group in cluster.nodes]
    share = max(1, seq_length // max(1, len(chosen) // tp))
    members: list[ContextMember] = []
    nodes: dict[str, int] = {}
    speeds: dict[str, ContextMember] = {}
    for block in _tp_groups(cluster, chosen, tp):
        first = cluster.ranks[block[0]]
        if first.group not in speeds:
            speeds[first.group] = _member(model, rates, first, seq_length, share, tp, margin)
        node = nodes.setdefault(first.node, len(nodes))
        members.append(replace(speeds[first.group], ranks=block, node=node, kind=groups.index(first.group)))
    used = sorted({member.kind for member in members})
    fabric = _fabric(rates, groups, members, tp, cards_shared)
    options = replace(options or ContextOptions(), item=ITEM_BYTES[dtype])
    members = [replace(m, kind=used.index(m.kind)) for m in members]
    return ContextProblem(model, seq_length, tuple(members), fabric, options)


def _check_ranks(cluster: Cluster, ranks: Sequence[int], dtype: str) -> None:
    if not ranks:
        raise UserError("context parallelism needs a rank", field="ranks", value=[], accepted="at least one rank")
    for rank in ranks:
        if not 0 <= rank < cluster.world_size:
            raise UserError(
                "the cluster has no such rank", field="ranks", value=rank, where=cluster.file,
                accepted=f"0 to {cluster.world_size - 1}",
            )  # fmt: skip
        if dtype not in cluster.chip_of(rank).dtypes:
            raise UserError(
                f"rank {rank} is a {cluster.chip_of(rank).name}, which has no {dtype}", field="dtype", value=dtype,
                accepted="one of " + ", ".join(cluster.chip_of(rank).dtypes), where=cluster.file,
            )  # fmt: skip


def _tp_groups(cluster: Cluster, ranks: Sequence[int], tp: int) -> list[tuple[int, ...]]:
    """``tp`` consecutive ranks of one node at a time, in the given order."""
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(cluster.ranks[rank].node, []).append(rank)
    groups: list[tuple[int, ...]] = []
    for node, members in nodes.items():
        if tp < 1 or len(members) % tp:
            raise UserError(
                f"node {node} gives {len(members)} ranks, which TP groups of {tp} do not divide", field="tp", value=tp,
                accepted="a divisor of the ranks of every node", where=cluster.file,
            )  # fmt: skip
        groups += [tuple(members[i : i + tp]) for i in range(0, len(members), tp)]
    return groups


def _member(
    model: ModelSpec, rates: Rates, at: Rank, seq_length: int, share: int, tp: int, margin: float
) -> ContextMember:
    """Speeds of a member of ``tp`` ranks from operator rates, corrected by measured whole-layer rows where there are
    any. Attention runs at the rate of the whole sequence's length, matrix products at that of ``share`` tokens."""
    chip_rates, chip, item = rates.chips[at.chip], rates.cluster.chips[at.chip], ITEM_BYTES[rates.dtype]
    operators = Operators(model, chip_rates, item)
    linear, ratio = operators.split(1 / tp, 1, share)
    core = tuple(seconds * r for seconds, r in zip(operators.attention(1 / tp, 1, seq_length), ratio))
    # Two gathers and two scatter-sums of the hidden state per layer and forward (sequence parallelism).
    beta = rates.between(at.group, at.group, same_node=True).beta if tp > 1 else 0.0
    return ContextMember(
        ranks=(0,), node=0, kind=0,
        gemm_flops=layer_matmul_flops(model) / (linear[0] / share),
        attention_flops=layer_attention_flops(model, mean_attention_pairs(model, seq_length)) / core[0],
        memory=((chip.memory_budget or chip.memory) * (1 - margin) - chip_rates.overhead_bytes) * tp,
        token_seconds=4 * model.hidden_size * item * (tp - 1) / tp * beta,
        layer_seconds=chip_rates.layer_seconds,
        layer_backward_seconds=chip_rates.layer_backward_seconds,
        attention_backward=core[1] / core[0],
        message_seconds=chip_rates.message_seconds,
        visit=_visit(chip_rates, model, 3),
        visit_backward=_visit(chip_rates, model, 4),
    )  # fmt: skip


def _visit(rates: ChipRates, model: ModelSpec, column: int) -> tuple[float, float]:
    """(seconds, seconds per query and head) of processing one block of keys: a line fitted to measured rows; zeros
    without."""
    rows = [row for row in rates.visits if row[2] == model.head_dim]
    if not rows:
        return 0.0, 0.0
    sizes, seconds = np.array([row[0] * row[1] for row in rows]), np.array([row[column] for row in rows])
    if len(set(sizes.tolist())) < 2:
        return float(seconds.mean()), 0.0
    slope, fixed = np.polyfit(sizes, seconds, 1)
    if slope < 0 or fixed < 0:  # measurement noise: use the mean
        return (float(seconds.mean()), 0.0) if slope < 0 else (0.0, float((seconds / sizes).mean()))
    return float(fixed), float(slope)


def _fabric(
    rates: Rates, all_groups: Sequence[str], members: Sequence[ContextMember], tp: int, cards_shared: bool
) -> Fabric:
    """Links per kind of member. A member of ``tp`` ranks has ``tp`` links of its own inside a node; network cards
    belong to the node. ``members`` refer to ``all_groups`` by kind; the rows of the result are the used kinds,
    ascending."""
    kinds = [all_groups[m.kind] for m in members]
    groups = [name for name in all_groups if name in set(kinds)]
    nodes = Counter(m.node for m in members)
    crowded = {name for m, name in zip(members, kinds, strict=True) if nodes[m.node] > 1}
    unused = (0.0, 0.0)  # unused links, which the cluster file may omit
    intra, inter = [], []
    for group in groups:
        inside = rates.between(group, group, same_node=True) if group in crowded else None
        intra.append((inside.alpha, inside.beta / tp) if inside else unused)
        links = [rates.between(group, other_group) if len(nodes) > 1 else None for other_group in groups]
        cards = 1 if cards_shared else tp
        inter.append(tuple((link.alpha, link.beta / cards) if link else unused for link in links))
    return Fabric(tuple(intra), tuple(inter), cards_shared)
