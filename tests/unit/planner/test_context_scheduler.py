"""The context scheduler: against an exact solver, against equal layouts, its byte counts against layouts of boxes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.context_equal import few_equal, kind_of, ranked_equal
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout, transfer
from hetero_megatron.planner.context.cost import ContextCosts, kv_heads, shared_kv
from hetero_megatron.planner.context.groupings import clusters, equal_layouts, partitions, unevenness
from hetero_megatron.planner.context.problem import (
    ContextLayout,
    ContextMember,
    ContextOptions,
    ContextProblem,
    Fabric,
    MemberGroup,
)
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.planner.shares import min_max_shares, min_max_tokens
from hetero_megatron.spec import ModelSpec, load_model
from tests.support.context_exact import compositions, exact_context
from tests.support.selection import each, quick

BIG = 1e15


def small_model(heads: int = 4, kv: int = 4, layers: int = 2) -> ModelSpec:
    return ModelSpec("m", "llama", layers, 64, 176, heads, kv, 16, 256, 1 << 20)


def random_problem(
    rng: random.Random, world: int, heads: int = 4, units: int = 8, memory: float = BIG, nodes: int = 2
) -> ContextProblem:
    """Members of two kinds in a few nodes; computing and links of like weight, so that every term matters."""
    model = small_model(heads, rng.choice([k for k in (1, 2, 4) if heads % k == 0 and k <= heads]))
    speeds = [rng.uniform(1e9, 8e9) for _ in range(nodes)]
    members = []
    for rank in range(world):
        node = rank * nodes // world
        members.append(
            ContextMember(
                (rank,),
                node,
                node,
                speeds[node],
                speeds[node] * (rng.choice([0.4, 0.6]) if rank == 0 else 0.5),
                memory,
                layer_seconds=1e-4,
                message_seconds=rng.choice([0.0, 1e-4]),
            )  # fmt: skip
        )
    beta = 10 ** rng.uniform(-9.5, -8)
    slow = beta * rng.choice([1, 4, 20])
    intra = tuple((1e-5, beta) for _ in range(nodes))
    inter = tuple(tuple((1e-4, slow) for _ in range(nodes)) for _ in range(nodes))
    options = ContextOptions(recompute=rng.choice(["none", "full"]), token_unit=256)
    fabric = Fabric(intra, inter, rng.random() < 0.5)
    return ContextProblem(model, 256 * units, tuple(members), fabric, options)


def exact_seconds(problem: ContextProblem, found_block: int) -> float:
    blocks = sorted({problem.unit, problem.seq_length // 4, found_block} - {0})
    return exact_context(problem, blocks)[1].seconds


# ---- against the exact solver


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick(range(12), range(3), range(3, 6)))
def test_close_to_the_exact_optimum_on_three_members(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, 3, units=6)
    choice = schedule_context(problem)
    assert choice.seconds <= exact_seconds(problem, choice.layout.block) * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_close_to_the_exact_optimum_on_four_members(seed: int) -> None:
    rng = random.Random(100 + seed)
    problem = random_problem(rng, 4, heads=2, units=5)
    choice = schedule_context(problem)
    assert choice.seconds <= exact_seconds(problem, choice.layout.block) * 1.02


@pytest.mark.parametrize("seed", quick(range(6), range(3), []))
def test_topology_clusters_alone_come_near_the_exact_optimum(seed: int) -> None:
    rng = random.Random(200 + seed)
    problem = random_problem(rng, 3, units=6)
    choice = schedule_context(problem, exhaustive=False)
    assert choice.seconds <= exact_seconds(problem, choice.layout.block) * 1.05


@each("seed", range(40))
def test_min_max_shares_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    parts, total = rng.randint(1, 4), rng.randint(0, 9)
    cost = [rng.choice([1.0, 1.5, 2.0, 3.17]) for _ in range(parts)]
    caps = [rng.randint(0, 6) for _ in range(parts)]
    allowed = [c for c in compositions(total, parts) if all(n <= cap for n, cap in zip(c, caps))]
    if not allowed:
        with pytest.raises(ValueError, match="caps"):
            min_max_shares(total, cost, caps)
        return
    best = min(max(n * c for n, c in zip(shares, cost)) for shares in allowed)
    found = min_max_shares(total, cost, caps)
    assert found.sum() == total and (found <= caps).all() and (found >= 0).all()
    assert max(found * np.array(cost)) == pytest.approx(best)


@each("seed", range(20))
def test_min_max_shares_of_at_least_one_and_with_fixed_seconds_are_exact(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.randint(1, 4)
    total, cost = parts + rng.randint(0, 6), [rng.choice([1.0, 1.5, 3.17]) for _ in range(parts)]
    fixed = [rng.choice([0.0, 2.0, 5.3]) for _ in range(parts)]
    ways = [way for way in compositions(total, parts) if min(way) > 0]
    found = min_max_shares(total, cost, fixed=fixed, least=1)
    assert found.sum() == total and found.min() > 0
    best, ours = (min(max(f + n * c for f, n, c in zip(fixed, way, cost)) for way in rows) for rows in (ways, [found]))
    assert ours == pytest.approx(best)


def test_tokens_are_whole_units_and_a_rest() -> None:
    cost, room = np.array([1.0, 2.0]), np.array([1000.0, 1000.0])
    assert min_max_tokens(1003, 100, cost, room) == (700, 303)
    assert min_max_tokens(1003, 100, cost, np.array([500.0, 1000.0])) == (500, 503)
    assert min_max_tokens(1003, 100, cost, np.array([500.0, 502.0])) is None


# ---- never worse than equal layouts


@pytest.mark.parametrize("seed", range(10))
def test_never_worse_than_ring_ulysses_and_usp(seed: int) -> None:
    rng = random.Random(300 + seed)
    problem = random_problem(rng, rng.choice([5, 8, 12]), heads=8, units=64, nodes=rng.choice([1, 2, 4]))
    choice = schedule_context(problem)
    costs = ContextCosts(problem)
    for layout in equal_layouts(problem):
        found = costs.evaluate(layout)
        assert not found.fits or choice.seconds <= found.seconds * (1 + 1e-12), layout
        assert found.seconds >= choice.bound * (1 - 1e-9)
    assert choice.gain is not None and choice.gain >= 1 and choice.seconds >= choice.bound * (1 - 1e-9)


def test_equal_layouts_are_all_factorisations() -> None:
    problem = random_problem(random.Random(0), 12, heads=8, units=64)
    names = {layout.name.removesuffix(" strided") for layout in equal_layouts(problem)}
    assert names == {"ring", "usp 2x6", "usp 4x3"}  # 8 heads cannot be divided by 3, 6 or 12
    names = {layout.name for layout in equal_layouts(random_problem(random.Random(0), 8, heads=8, units=64))}
    assert {"ring", "ulysses", "usp 2x4", "usp 4x2 strided"} <= names


def test_the_best_equal_layouts_of_every_kind_are_chosen() -> None:
    """On 4 members of 4 heads: ring, Ulysses, and USP 2x2 of consecutive and of strided members."""
    problem = random_problem(random.Random(1), 4)
    few, legal = few_equal(problem, 2)
    ranked = ranked_equal(problem)
    assert legal == len(ranked) == len(equal_layouts(problem))
    assert [found.seconds for _, found in few] == sorted(found.seconds for _, found in few)
    chosen = Counter(kind_of(layout) for layout, _ in few)
    assert chosen == {"ring": 1, "usp": 2, "ulysses": 1}
    for kind in chosen:
        best = min(found.seconds for layout, found in ranked if kind_of(layout) == kind)
        assert best == min(found.seconds for layout, found in few if kind_of(layout) == kind)


def test_equal_members_are_shared_equally_and_fast_ones_get_more() -> None:
    problem = random_problem(random.Random(1), 4, heads=8, units=64)
    alike = [replace(m, kind=0, node=0, gemm_flops=1e9, attention_flops=1e9) for m in problem.members]
    same = replace(problem, members=tuple(alike))
    tokens = _tokens(schedule_context(same).layout)
    assert max(tokens.values()) - min(tokens.values()) <= same.unit
    fast = replace(same, members=(replace(same.members[0], gemm_flops=4e9, attention_flops=4e9), *same.members[1:]))
    choice = schedule_context(fast)
    tokens = _tokens(choice.layout)
    assert tokens[0] > 2 * max(tokens[m] for m in (1, 2, 3))
    assert choice.gain is not None and choice.gain > 1.5  # the bound is (4 + 3) / 4


def _tokens(layout: ContextLayout) -> dict[int, int]:
    return {m: n for g in layout.groups for m, n in zip(g.members, g.tokens, strict=True)}


# ---- what every choice obeys


@pytest.mark.parametrize("seed", range(10))
def test_choices_are_legal_and_within_memory(seed: int) -> None:
    rng = random.Random(400 + seed)
    world = rng.choice([1, 2, 3, 7, 10])
    problem = random_problem(rng, world, heads=rng.choice([1, 4, 6]), units=40, nodes=min(world, 3))
    problem = replace(problem, seq_length=problem.seq_length + rng.randint(0, 255))
    free = schedule_context(problem).evaluation.memory
    for scale in (1.0, 0.8):  # as much memory as the free choice needs, then less: shares move to where there is room
        members = tuple(replace(m, memory=max(free) * scale) for m in problem.members)
        tight = replace(problem, members=members)
        try:
            choice = schedule_context(tight)
        except UserError as error:
            assert scale < 1 and "GiB" in str(error)
            continue
        assert all(used <= m.memory * (1 + 1e-9) for used, m in zip(choice.evaluation.memory, members, strict=True))
        _check_legal(tight, choice.layout)


def _check_legal(problem: ContextProblem, layout: ContextLayout) -> None:
    assert sorted(m for g in layout.groups for m in g.members) == list(range(len(problem.members)))
    assert sum(_tokens(layout).values()) == problem.seq_length
    for group in layout.groups:
        assert sum(group.heads) == problem.model.num_heads and min(*group.heads, 0) == 0 and min(*group.tokens, 0) == 0
    assert (layout.transport == "a2a") == (len(layout.groups) == 1)
    assert (layout.block > 0) == (layout.transport == "ring")


def test_memory_grows_with_the_own_shard_and_two_blocks_only() -> None:
    """Doubling the ranks at the same shard and block leaves a member's bytes as they are."""
    used = []
    for world in (4, 8, 16):
        problem = random_problem(random.Random(5), world, nodes=1)
        options = ContextOptions(recompute="full", token_unit=256)
        problem = replace(problem, seq_length=1024 * world, model=small_model(), options=options)
        groups = tuple(MemberGroup((m,), (1024,), (4,)) for m in range(world))
        costs = ContextCosts(problem)
        # Without the states, of which a larger world holds less each.
        used.append(costs.evaluate(ContextLayout(groups, "ring", 256)).memory[0] - (BIG - costs.limits[0]))
    assert np.ptp(used) <= 1e-6 * used[0] + 1


def test_a_small_memory_moves_tokens_away() -> None:
    problem = random_problem(random.Random(6), 4, heads=4, units=64)
    free = schedule_context(problem)
    most = max(range(4), key=lambda m: free.evaluation.memory[m])
    scale = [0.7 if i == most else 3 for i in range(4)]
    used = free.evaluation.memory
    members = tuple(replace(m, memory=used[i] * scale[i]) for i, m in enumerate(problem.members))
    choice = schedule_context(replace(problem, members=members))
    assert _tokens(choice.layout)[most] < _tokens(free.layout)[most]
    assert choice.seconds >= free.seconds * (1 - 1e-9)


# ---- byte counts


@pytest.mark.parametrize("seed", range(10))
def test_all_to_all_bytes_are_those_of_the_layouts(seed: int) -> None:
    """Queries from token shards to head shards: the scheduler's s_i h_j against intersected boxes; links of one kind,
    no latency, so that seconds are the busiest member's bytes."""
    rng = random.Random(seed)
    world, heads = rng.randint(2, 5), 8
    tokens = [rng.randint(0, 9) for _ in range(world)]
    tokens[0] += 1
    share = rng.choice(list(compositions(heads, world)))
    cut, starts = np.cumsum([0, *share]), np.cumsum([0, *tokens])
    shape = (int(starts[-1]), heads)
    rows = {r: Box((int(starts[r]), 0), (int(starts[r + 1]), heads)) for r in range(world) if tokens[r]}
    columns = {r: Box((0, int(cut[r])), (shape[0], int(cut[r + 1]))) for r in range(world) if share[r]}
    have = Layout(shape, {r: (box,) for r, box in rows.items()})
    want = Layout(shape, {r: (box,) for r, box in columns.items()})
    sent, received = [0] * world, [0] * world
    for piece in transfer(have, want).pieces:
        if piece.src != piece.dst:
            sent[piece.src] += piece.box.size
            received[piece.dst] += piece.box.size
    problem = random_problem(random.Random(0), world, heads=heads, nodes=1)
    problem = replace(
        problem,
        members=tuple(replace(m, message_seconds=0.0) for m in problem.members),
        fabric=Fabric(((0.0, 1.0),), (((0.0, 1.0),),)),
    )
    costs = ContextCosts(problem)
    seconds = costs._all_to_all(np.arange(world), np.array(tokens, float), np.array(share, float))
    assert seconds == pytest.approx(max(*sent, *received) * costs.byte)


@each("seed", range(30))
def test_kv_heads_by_counting(seed: int) -> None:
    rng = random.Random(seed)
    per_kv, kv = rng.choice([1, 2, 4]), rng.choice([1, 2, 3])
    heads = per_kv * kv
    a, b = (rng.choice(list(compositions(heads, rng.randint(1, 4)))) for _ in range(2))

    def needed(shares: tuple[int, ...]) -> list[set[int]]:
        ends = np.cumsum([0, *shares])
        return [{q // per_kv for q in range(ends[i], ends[i + 1])} for i in range(len(shares))]

    assert list(kv_heads(a, per_kv)) == [len(s) for s in needed(a)]
    held, passed = needed(a), [[0] * len(b) for _ in a]
    for j, wanted in enumerate(needed(b)):
        for head in wanted:
            passed[next(i for i, s in enumerate(held) if head in s)][j] += 1
    found = [[0] * len(b) for _ in a]
    for i, j, count in shared_kv(a, b, per_kv):
        found[i][j] += count
    assert found == passed


def test_a_slow_link_is_crossed_by_less() -> None:
    """Two nodes with a hundredfold slower link between them, grouped query heads: no Ulysses across."""
    rng = random.Random(3)
    problem = random_problem(rng, 8, heads=8, units=64)
    model = replace(problem.model, num_kv_heads=1)
    fabric = Fabric(((1e-6, 1e-10),) * 2, (((1e-5, 1e-8),) * 2,) * 2)
    choice = schedule_context(replace(problem, model=model, fabric=fabric))
    costs = ContextCosts(replace(problem, model=model, fabric=fabric))
    across = next(x for x in equal_layouts(costs.problem) if x.name == "ulysses")
    assert len(choice.layout.groups) > 1 and choice.seconds < costs.evaluate(across).seconds


# ---- groupings


def test_partitions_are_bell_numbers() -> None:
    assert [len(list(partitions(range(n)))) for n in range(6)] == [1, 1, 2, 5, 15, 52]


def test_clusters_use_every_member_once() -> None:
    problem = random_problem(random.Random(0), 14, nodes=3)
    found = clusters(problem)
    assert len(set(found)) == len(found) > 10
    for grouping in found:
        assert sorted(m for group in grouping for m in group) == list(range(14))


# ---- refusals


def test_refusals_say_what_is_wrong() -> None:
    problem = random_problem(random.Random(0), 3)
    with pytest.raises(UserError, match="needs a rank"):
        replace(problem, members=())
    with pytest.raises(UserError, match="ranks of its own"):
        replace(problem, members=problem.members[:1] * 2)
    with pytest.raises(UserError, match="weights, gradients and optimizer alone need .* GiB more than rank 0"):
        schedule_context(replace(problem, members=tuple(replace(m, memory=1e5) for m in problem.members)))
    state = BIG - ContextCosts(problem).limits[0]
    with pytest.raises(UserError, match="no division of 2048 tokens over 3 members fits"):
        schedule_context(replace(problem, members=tuple(replace(m, memory=state + 1e4) for m in problem.members)))
    with pytest.raises(UserError, match=r"unknown recompute.*none \| selective \| full"):
        replace(problem, options=replace(problem.options, recompute="most"))
    with pytest.raises(UserError, match="no speed"):
        replace(problem, members=(replace(problem.members[0], gemm_flops=0.0),))


def test_more_members_than_heads_need_several_groups_or_idle_members() -> None:
    problem = random_problem(random.Random(2), 7, heads=1, units=64, nodes=1)
    choice = schedule_context(problem)
    assert all(sum(h > 0 for h in g.heads) == 1 for g in choice.layout.groups)
    assert all(layout.name == "ring" for layout in equal_layouts(problem))
    assert len(choice.layout.groups) > 1


def test_real_models_have_the_memory_that_the_estimate_counts() -> None:
    """Alone and without recompute, a member's activations are those of the layer formulas that training uses; backward
    needs most in the MLP, where attention's core is not there again."""
    from hetero_megatron.spec.activation_bytes import layer_activation_bytes

    model = load_model("llama3-8b")
    member = ContextMember((0,), 0, 0, 1e12, 1e12, BIG)
    fabric = Fabric(((0.0, 1e-9),), (((0.0, 1e-9),),))
    for recompute in ("none", "selective"):
        problem = ContextProblem(model, 8192, (member,), fabric, ContextOptions(recompute=recompute, head=False))
        costs = ContextCosts(problem)
        used = costs.evaluate(equal_layouts(problem)[0])
        parts = used.parts[0].bytes[0]
        kept = 32 * layer_activation_bytes(model, 8192, recompute)
        working = 8192 * 2 * (4096 + 3 * 14336)
        assert parts == pytest.approx(kept + working)


def test_frozen_weights_have_no_gradients_and_states() -> None:
    from hetero_megatron.planner.context.memory import member_states
    from hetero_megatron.spec import Lora, adapted, logical_tensors

    base = load_model("tiny")
    fabric = Fabric(((0.0, 1e-9),), (((0.0, 1e-9),),))
    for model in (base, adapted(base, Lora(4, 8.0))):
        options = ContextOptions(item=2, head=True, embed=True)
        each, together = member_states(
            ContextProblem(model, 64, (ContextMember((0,), 0, 0, 1e12, 1e12, BIG),), fabric, options)
        )
        tensors = logical_tensors(model)
        held, trained = sum(t.size for t in tensors), sum(t.size for t in tensors if t.trained)
        assert each == 2 * held + 4 * trained and together == 12 * trained


# ---- the ring, message by message; memory against brute force; many members


@pytest.mark.parametrize("seed", range(12))
def test_ring_rate_by_counting_messages(seed: int) -> None:
    """Bytes per token over every member's own link and every node's cards, from who needs which KV head of whom."""
    rng = random.Random(500 + seed)
    world, nodes = rng.randint(2, 7), rng.randint(1, 3)
    problem = random_problem(rng, world, heads=4, nodes=nodes)
    grouping = rng.choice(clusters(problem))
    if len(grouping) == 1:
        grouping = tuple((m,) for m in range(world))
    groups = [MemberGroup(g, (1,) * len(g), rng.choice(list(compositions(4, len(g))))) for g in grouping]
    per_kv = problem.model.queries_per_kv
    own: dict[tuple[str, int], float] = {}  # seconds per byte on (direction, member)
    cards: dict[tuple[str, int], float] = {}
    shared = problem.fabric.shared
    for k, group in enumerate(groups):
        needs = []
        for g in (groups[k - 1], group):
            ends = np.cumsum([0, *g.heads])
            needs.append([{q // per_kv for q in range(ends[i], ends[i + 1])} for i in range(len(g.members))])
        for j, wanted in enumerate(needs[1]):
            for head in wanted:
                src = groups[k - 1].members[next(i for i, held in enumerate(needs[0]) if head in held)]
                dst = group.members[j]
                a, b = problem.members[src], problem.members[dst]
                same = a.node == b.node
                beta = problem.fabric.intra[a.kind][1] if same else problem.fabric.inter[a.kind][b.kind][1]
                for direction, end in (("out", a), ("into", b)):
                    at = end.node if shared and not same else end.ranks[0]
                    table = own if same or not shared else cards
                    port = (f"{direction} {'near' if same else 'far'}", at)
                    table[port] = table.get(port, 0.0) + beta
    rate, _, _ = ContextCosts(problem).ring(groups)
    assert rate == pytest.approx(max([*own.values(), *cards.values()]))


@pytest.mark.parametrize("seed", quick(range(6), range(2), []))
def test_close_to_the_exact_optimum_where_memory_binds(seed: int) -> None:
    rng = random.Random(600 + seed)
    problem = random_problem(rng, 3, units=6)
    free = schedule_context(problem)
    most = max(free.evaluation.memory)
    scale = [1.0, 1.0, 1.0]
    scale[max(range(3), key=lambda m: free.evaluation.memory[m])] = rng.choice([0.6, 0.8])
    members = tuple(replace(m, memory=most * scale[i]) for i, m in enumerate(problem.members))
    tight = replace(problem, members=members)
    try:
        best = exact_seconds(tight, free.layout.block)
    except UserError:
        with pytest.raises(UserError):
            schedule_context(tight)
        return
    assert schedule_context(tight).seconds <= best * 1.05


def test_blocks_of_unlike_size_cost_the_pace_of_the_largest_shard() -> None:
    tokens = np.array([1024.0, 512, 256, 256])
    assert unevenness(tokens, 1024) == 4 * 1024 / 2048
    assert unevenness(tokens, 256) == 1.0
    for block in (256, 1024):  # groups without tokens have no part in the rounds
        assert unevenness(np.append(tokens, 0.0), block) == unevenness(tokens, block)


@pytest.mark.parametrize("world", quick([32, 96], [32]))
def test_many_members(world: int) -> None:
    """Structured groupings only: legal, never worse than equal layouts, and above the bound."""
    problem = random_problem(random.Random(world), world, heads=8, units=1000, nodes=world // 8)
    choice = schedule_context(problem)
    _check_legal(problem, choice.layout)
    assert choice.gain is not None and choice.gain > 1.0
    assert choice.bound <= choice.seconds <= 3 * choice.bound
