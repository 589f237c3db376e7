"""Seconds and bytes of one step under a context layout: the model that the context scheduler minimises.

Per layer and group k (tokens S_k, members d with s_d tokens and h_d query heads; equations reconstructed for HexiSeq,
arXiv 2605.07569, and extended):

    forward_k  = max_d linear(s_d) + all-to-all + hide(max_d attention(h_d S_k), exchange) + all-to-all
    backward_k = the same with 2 x linear, 2.5 x attention, gradients of keys and values on the exchange
    layer      = max_k forward_k + max_k backward_k        (groups wait for each other's keys and values)

The all-to-all is ragged: member i sends s_i (h_j + 2 kv_j) numbers to j. A ring moves at the pace of its slowest hop,
because every block passes every hop, and in rounds of one block per group, so blocks of unequal size cost time
(:func:`unevenness`); block sizes need not match ownership. Members' own links and the network cards of a node work at
the same time; the cards are shared by the members of a node if the fabric says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.context.groupings import unevenness
from hetero_megatron.planner.context.memory import group_bytes, member_limits, ring_bytes
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem, MemberGroup
from hetero_megatron.spec.flops import attention_layers, layer_parameters, linear_layers
from hetero_megatron.utils.cached_method import cached_method

Floats = npt.NDArray[np.float64]
VISITED = 0.75  # mean share of a group's queries that see some key of a zigzag block


@dataclass(frozen=True)
class GroupParts:
    """One group's forward seconds per layer, unless named backward.

    Attributes:
        tokens: owned by the group.
        linear, linear_backward: outside attention; head: output head; attention, attention_backward: the core.
        scatter, collect: all-to-alls of q, k and v; of the output.
        floor: least seconds (forward, backward) by kernel launches.
        visit: (forward, backward) seconds per block of keys besides its FLOPs.
        bytes: [members] without exchange buffers; kv: [members] KV heads.
    """

    tokens: float
    linear: float
    linear_backward: float
    head: float
    scatter: float
    collect: float
    attention: float
    attention_backward: float
    floor: tuple[float, float]
    visit: tuple[float, float]
    bytes: Floats
    kv: Floats


@dataclass(frozen=True)
class LayoutCost:
    """The cost of a layout.

    Args:
        seconds: of one micro-batch, forward and backward through the stage.
        fits: every member's bytes are within its memory.
        group_seconds: the same per group, if it did not wait for others.
        memory: bytes per member, in the problem's order.
    """

    seconds: float
    fits: bool
    group_seconds: tuple[float, ...]
    memory: tuple[float, ...]
    parts: tuple[GroupParts, ...]

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: seconds (inf if it does not fit), then the sum of the groups' own seconds."""
        return (self.seconds if self.fits else float("inf"), sum(self.group_seconds))


@dataclass(frozen=True)
class _RingHop:
    """One hop of the ring: seconds per byte of one KV head's token on members' own links, and on nodes' cards."""

    intra: float
    own_card: float
    out: tuple[tuple[int, float], ...]
    into: tuple[tuple[int, float], ...]
    alpha: float
    messages: int


@lru_cache(maxsize=65536)
def kv_heads(heads: tuple[int, ...], per_kv: int) -> tuple[int, ...]:
    """KV heads that each member needs; query heads are contiguous in listed order, shared KV heads count for each
    member."""
    first, counts = 0, []
    for count in heads:
        counts.append((first + count - 1) // per_kv - first // per_kv + 1 if count else 0)
        first += count
    return tuple(counts)


@lru_cache(maxsize=65536)
def shared_kv(a: tuple[int, ...], b: tuple[int, ...], per_kv: int) -> tuple[tuple[int, int, int], ...]:
    """(i, j, KV heads) that member i of group ``a`` passes to member j of group ``b``: each head from its first holder.
    """
    senders: list[tuple[int, int, int]] = []  # first KV head, end, member
    first, covered = 0, 0
    for i, count in enumerate(a):
        end = (first + count - 1) // per_kv + 1 if count else covered
        if end > covered:
            senders.append((covered, end, i))
            covered = end
        first += count
    ends = [end for _, end, _ in senders]
    pairs, first = [], 0
    for j, count in enumerate(b):
        lo, hi = first // per_kv, (first + count - 1) // per_kv + 1
        first += count
        sender = bisect_right(ends, lo) if count else len(senders)
        while sender < len(senders) and senders[sender][0] < hi:
            pairs.append((senders[sender][2], j, min(hi, ends[sender]) - max(lo, senders[sender][0])))
            sender += 1
    return tuple(pairs)


class ContextCosts:
    """Evaluates layouts of one problem; equal groups are computed once."""

    def __init__(self, problem: ContextProblem) -> None:
        self.problem = problem
        members, model = problem.members, problem.model
        self.node = np.array([m.node for m in members])
        self.kind = np.array([m.kind for m in members])
        self.products = np.array([
            problem.linear_flops / m.gemm_flops + problem.carried_flops / m.attention_flops for m in members
        ])  # fmt: skip
        self.linear = self.products + np.array([m.token_seconds for m in members])
        self.floor = np.array([(m.layer_seconds, m.layer_backward_seconds) for m in members])
        self.head = np.array([problem.head_flops / m.gemm_flops for m in members])
        self.pair = np.array([problem.pair_flops / m.attention_flops for m in members])
        self.backward = np.array([m.attention_backward for m in members])
        self.message = np.array([m.message_seconds for m in members])
        self.visits = np.array([(m.visit, m.visit_backward) for m in members]) * problem.options.micro_batch
        self.memory = np.array([m.memory for m in members])
        self.limits = member_limits(problem)
        self.per_kv = model.queries_per_kv
        attention = attention_layers(model)  # the share of layers that exchange queries, keys and values
        self.byte = attention * float(model.head_dim * problem.options.item * problem.options.micro_batch)
        fabric = problem.fabric
        self.intra = np.array([beta for _, beta in fabric.intra])
        self.inter = np.array([[beta for _, beta in row] for row in fabric.inter])
        self.alpha_intra = np.array([alpha for alpha, _ in fabric.intra])
        self.alpha_inter = np.array([[alpha for alpha, _ in row] for row in fabric.inter])
        types: dict[object, int] = {}
        kinds = ((replace(m, ranks=(), node=0), len(m.ranks)) for m in members)
        self.type = [types.setdefault(kind, len(types)) for kind in kinds]
        self._first: dict[object, tuple[int, ...]] = {}
        self.chain = self._chain_seconds()

    @cached_method
    def alike(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The first group that was asked for that only differs in which ranks of equal kind and which nodes it has."""
        nodes: dict[int, int] = {}
        local = tuple(nodes.setdefault(int(self.node[m]), len(nodes)) for m in members)
        return self._first.setdefault((tuple(self.type[m] for m in members), local), members)

    def parts(self, members: tuple[int, ...], tokens: tuple[float, ...], heads: tuple[int, ...]) -> GroupParts:
        """One group's times; ``tokens`` need not be integers."""
        return self._parts(self.alike(members), tokens, heads)

    @cached_method
    def _parts(self, members: tuple[int, ...], tokens: tuple[float, ...], heads: tuple[int, ...]) -> GroupParts:
        d, s = np.array(members), np.array(tokens, dtype=np.float64)
        h, kv = np.array(heads, dtype=np.float64), np.array(kv_heads(heads, self.per_kv), dtype=np.float64)
        total = float(s.sum())
        busy = (h > 0) | (s > 0)
        attention = self.pair[d] * h * total
        linear = self.linear[d] * s
        floor = self.floor[d][busy].max(0) if busy.any() else np.zeros(2)
        return GroupParts(
            tokens=total,
            linear=float(linear.max()),
            linear_backward=float((linear + self.products[d] * s).max()),
            head=float((self.head[d] * s).max()),
            scatter=self._all_to_all(d, s, h + 2 * kv),
            collect=self._all_to_all(d, h, s),
            attention=float(attention.max()),
            attention_backward=float((attention * self.backward[d]).max()),
            floor=(float(floor[0]), float(floor[1])),
            visit=self._visit(d, h * total * VISITED),
            bytes=group_bytes(self.problem, s, h, kv),
            kv=kv,
        )

    def _visit(self, d: npt.NDArray[np.int64], rows: Floats) -> tuple[float, float]:
        """(forward, backward) seconds per block besides its FLOPs, of the slowest member."""
        forward, backward = (self.visits[d, i, 0] * (rows > 0) + self.visits[d, i, 1] * rows for i in (0, 1))
        return float(forward.max()), float(backward.max())

    def _all_to_all(self, d: npt.NDArray[np.int64], give: Floats, take: Floats) -> float:
        """Seconds of a ragged all-to-all in which i sends give_i x take_j numbers of ``self.byte`` bytes to j."""
        if len(d) == 1 or not total_exchange(give, take):
            return 0.0
        kinds, node = len(self.intra), np.unique(self.node[d], return_inverse=True)[1]
        kind = self.kind[d]
        count = int(node.max()) + 1
        home = np.zeros(count, dtype=np.int64)
        home[node] = kind
        slowest = 0.0
        for out, into, beta in ((give, take, self.inter), (take, give, self.inter.T)):
            within_node = np.bincount(node, into, count)[node]
            intra = out * (within_node - into) * self.intra[kind]
            by_kind = np.bincount(kind, into, kinds)
            across_nodes = by_kind[None, :] - (np.arange(kinds)[None, :] == kind[:, None]) * within_node[:, None]
            inter = out * (across_nodes * beta[kind]).sum(1)
            if self.problem.fabric.shared and count > 1:
                inter = np.bincount(node, inter, count)
            slowest = max(slowest, float(intra.max()), float(inter.max()) if count > 1 else 0.0)
        peers = (give > 0) * ((take > 0).sum() - (take > 0)) + (take > 0) * ((give > 0).sum() - (give > 0))
        alpha = self.alpha_intra[kind].max() if len(d) > count else 0.0
        if count > 1:
            alpha = max(alpha, self.alpha_inter[np.ix_(np.unique(home), np.unique(home))].max())
        return slowest * self.byte + float(alpha) + float((peers * self.message[d]).max())

    @cached_method
    def _hop(
        self, a: tuple[int, ...], a_heads: tuple[int, ...], b: tuple[int, ...], b_heads: tuple[int, ...]
    ) -> _RingHop:
        """From members ``a`` to members ``b``."""
        pairs = np.array(shared_kv(a_heads, b_heads, self.per_kv))
        src, dst, count = np.array(a)[pairs[:, 0]], np.array(b)[pairs[:, 1]], pairs[:, 2]
        same_node = self.node[src] == self.node[dst]
        ks, kd = self.kind[src], self.kind[dst]
        beta = np.where(same_node, self.intra[ks], self.inter[ks, kd]) * count
        alpha = np.where(same_node, self.alpha_intra[ks], self.alpha_inter[ks, kd])
        ends = (pairs[:, 0], pairs[:, 1])
        intra = max(float(np.bincount(e, beta * same_node).max()) for e in ends)
        card = max(float(np.bincount(e, beta * ~same_node).max()) for e in ends)
        crossing = np.flatnonzero(~same_node)
        out, into = ({}, {})  # type: tuple[dict[int, float], dict[int, float]]
        for i in crossing:
            out[int(self.node[src[i]])] = out.get(int(self.node[src[i]]), 0.0) + float(beta[i])
            into[int(self.node[dst[i]])] = into.get(int(self.node[dst[i]]), 0.0) + float(beta[i])
        messages = max(int(np.bincount(e).max()) for e in ends)
        return _RingHop(intra, card, tuple(out.items()), tuple(into.items()), float(alpha.max()), messages)

    def ring(self, groups: Sequence[MemberGroup]) -> tuple[float, float, int]:
        """(seconds per byte of one KV head's token, seconds per block, messages per block and member) of the ring."""
        if len(groups) == 1:
            return 0.0, 0.0, 0
        ends = [(group.members, group.heads) for group in groups]
        hops = [self._hop(*ends[k - 1], *ends[k]) for k in range(len(ends))]
        rate = max(hop.intra for hop in hops)
        if self.problem.fabric.shared:
            nodes = int(self.node.max()) + 1
            for side in ("out", "into"):
                load = np.zeros(nodes)
                for hop in hops:
                    for node, beta in getattr(hop, side):
                        load[node] += beta
                rate = max(rate, float(load.max()))
        else:
            rate = max(rate, max(hop.own_card for hop in hops))
        return rate, max(hop.alpha for hop in hops), 2 * max(hop.messages for hop in hops)

    def evaluate(self, layout: ContextLayout) -> LayoutCost:
        """Seconds of one micro-batch, and bytes per member."""
        problem, options = self.problem, self.problem.options
        groups = layout.groups
        parts = [self.parts(g.members, g.tokens, g.heads) for g in groups]
        tokens = np.array([p.tokens for p in parts])
        attention = np.array([p.attention for p in parts])
        attention_b = np.array([p.attention_backward for p in parts])
        linear = np.array([p.linear for p in parts])
        linear_b = np.array([p.linear_backward for p in parts])
        exchange = np.array([p.scatter + p.collect for p in parts])
        forward_core, backward_core = self._core(layout, parts, tokens, attention, attention_b)
        floor = np.array([p.floor for p in parts])
        forward = np.maximum(linear + exchange + forward_core, floor[:, 0])
        backward = np.maximum(linear_b + exchange + backward_core, floor[:, 1])
        recomputed, runs = options.core_again * forward_core, options.forwards
        gathered = self._state_seconds()
        per_layer = runs * max(float(forward.max()), gathered)
        per_layer += max(float((backward + recomputed).max()), 2 * gathered)
        per_layer += (runs + options.core_again + 1) * self.chain
        head = np.array([3 * p.head for p in parts])
        layers = problem.layers
        member_seconds = layers * (runs * forward + backward + recomputed) + head
        fits, memory = self._memory(layout, parts)
        seconds = layers * per_layer + float(head.max())
        return LayoutCost(seconds, fits, tuple(member_seconds.tolist()), memory, tuple(parts))

    def _core(
        self, layout: ContextLayout, parts: Sequence[GroupParts], tokens: Floats, forward: Floats, backward: Floats
    ) -> tuple[Floats, Floats]:
        """(forward, backward) seconds of attention, including what of the exchange of keys and values is not hidden."""
        problem, options = self.problem, self.problem.options
        if len(parts) == 1:
            return forward, backward
        assert layout.transport == "ring" and layout.block > 0, layout.transport
        slower, count = unevenness(tokens, layout.block), float(np.ceil(tokens / layout.block).sum())
        visit = np.array([p.visit for p in parts])
        forward, backward = forward * slower + count * visit[:, 0], backward * slower + count * visit[:, 1]
        once = 2 * self.byte  # K and V
        with_gradients = once * (1 + options.wide / options.item)  # and their gradients on the way back
        foreign = problem.seq_length - tokens
        rate, alpha, messages = self.ring(layout.groups)
        blocks = np.ceil(foreign / layout.block)
        host = blocks * messages * float(self.message.max())
        last = layout.block / problem.seq_length  # the last block arrives before its work can be done
        cores = []
        for work, size in ((forward, once), (backward, with_gradients)):
            busy = work + host
            moving = float((blocks * alpha + foreign * rate * size).max())
            cores.append(np.maximum(busy, moving + work * last))
        return cores[0], cores[1]

    def _chain_seconds(self) -> float:
        """Seconds in which the states of linear attention go from member to member, in an average layer: a message for
        every run of tokens but the first one, two of each member, over the slowest link."""
        delta, members = self.problem.model.delta, len(self.node)
        if delta is None or members == 1:
            return 0.0
        size = delta.value_heads * delta.key_dim * delta.value_dim * self.problem.options.wide
        kinds = np.unique(self.kind)
        same_node = len(np.unique(self.node)) == 1
        alpha, beta = (self.alpha_intra, self.intra) if same_node else (self.alpha_inter, self.inter)
        used = (kinds,) if same_node else np.ix_(kinds, kinds)
        each = float(alpha[used].max()) + size * self.problem.options.micro_batch * float(beta[used].max())
        return linear_layers(self.problem.model) * (2 * members - 1) * (each + float(self.message.max()))

    def _state_seconds(self) -> float:
        """Seconds to gather one layer's sharded weights (hidden behind the layer's compute); 0 without sharding."""
        if not self.problem.options.shard_states or len(self.node) == 1:
            return 0.0
        size = layer_parameters(self.problem.model) * self.problem.options.item
        if len(np.unique(self.node)) == 1:
            return float(size * self.intra[self.kind].max())
        kinds = np.unique(self.kind)
        # Gathered once per node over its cards, then spread over the faster links inside.
        cards = 1 if self.problem.fabric.shared else int(np.bincount(self.node).min())
        return float(size * max(self.inter[np.ix_(kinds, kinds)].max() / cards, self.intra[kinds].max()))

    def _memory(self, layout: ContextLayout, parts: Sequence[GroupParts]) -> tuple[bool, tuple[float, ...]]:
        buffer = ring_bytes(self.problem, layout.block) if len(parts) > 1 else 0.0
        memory = np.zeros(len(self.memory))
        for group, part in zip(layout.groups, parts, strict=True):
            memory[list(group.members)] = part.bytes + part.kv * buffer
        return bool((memory <= self.limits).all()), tuple((memory + self.memory - self.limits).tolist())


def total_exchange(give: Floats, take: Floats) -> float:
    """Numbers that move between members in an all-to-all."""
    return float(give.sum() * take.sum() - (give * take).sum())
