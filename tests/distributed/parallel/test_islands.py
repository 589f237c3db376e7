"""Sums in two hops across slow links: the same sums, fewer bytes; REDUCEs and collectives as data, checked."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout, assign_owners, reduction, representatives
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.plans import dump_yaml, load_plan, plan_from_dict, to_dict
from hetero_megatron.plans.buckets import Hop, layer_groups, make_buckets, plan_groups
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.islands import add_islands, crossing, format_islands, hop_elements
from hetero_megatron.plans.program import Collectives, format_step, step_schedules, sync_actions, validate_step
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.measured_runs import read_runs
from hetero_megatron.predictor.simulate.grad_sync import GradSync
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.schedule import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    format_grid,
    simulate,
    validate,
    validate_collectives,
)
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.parity import check_case, fixed_case, random_case
from tests.support.pool import shared_pool
from tests.support.selection import each

MODEL = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
SPEC = from_hf_config(MODEL)


def replicas(count: int, islands: list[Any] | None = None, tp: int = 1) -> dict[str, Any]:
    stages = [[{"ranks": list(range(i * tp, (i + 1) * tp)), "layers": [0, 4], "tp": tp}] for i in range(count)]
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": 1, "stages": s} for s in stages]
    plan = {"version": 1, "seq_length": 8, "global_batch_size": count, "schedule": "1f1b", "pipelines": pipelines}
    return plan | ({"islands": islands} if islands else {})


def random_layouts(draw: random.Random) -> tuple[Layout, list[list[int]]]:
    """Partial copies of a small matrix on 2 to 8 ranks, and the ranks in islands."""
    shape, ranks = (draw.randint(1, 9), draw.randint(1, 5)), list(range(draw.randint(2, 8)))
    boxes = {}
    for rank in ranks:
        a, b = sorted(draw.choices(range(shape[0] + 1), k=2))
        c, d = (0, shape[1]) if draw.random() < 0.5 else sorted(draw.choices(range(shape[1] + 1), k=2))
        boxes[rank] = (Box((a, c), (b, d)),)
    draw.shuffle(ranks)
    cuts = sorted(draw.choices(range(len(ranks) + 1), k=draw.randint(1, 3)))
    islands = [sorted(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ranks)]) if a < b]
    return Layout(shape, boxes), islands


@each("seed", range(60))
def test_two_hops_give_the_same_sum_and_fewest_crossings(seed: int) -> None:
    """Against NumPy: every island sums what it holds in one place, and one copy per island crosses."""
    holders, islands = random_layouts(random.Random(seed))
    owners = assign_owners({"x": holders}, whole_below=seed % 5)
    middle = representatives({"x": holders}, owners, islands)["x"]
    values = np.random.default_rng(seed).standard_normal((8, *holders.shape))
    held = np.zeros((8, *holders.shape), dtype=bool)
    for rank, box in holders.items():
        held[(rank, *box.slices())] = True
    at_middle, at_owner = np.zeros_like(values), np.zeros_like(values)
    for island in islands:
        for piece in reduction(holders.only(island), middle.only(island)).pieces:
            at_middle[(piece.dst, *piece.box.slices())] += values[(piece.src, *piece.box.slices())]
    crossed = 0
    island_of = {rank: i for i, ranks in enumerate(islands) for rank in ranks}
    for piece in reduction(middle, owners["x"]).pieces:
        at_owner[(piece.dst, *piece.box.slices())] += at_middle[(piece.src, *piece.box.slices())]
        crossed += piece.box.size * (island_of[piece.src] != island_of[piece.dst])
    np.testing.assert_allclose(at_owner.sum(0), (values * held).sum(0), rtol=1e-12, atol=1e-12)
    there = np.stack([held[ranks].any(0) for ranks in islands]).sum(0)
    assert crossed == np.maximum(there - 1, 0).sum()


def test_bytes_between_islands() -> None:
    """Four replicas on two nodes: two of four send to an owner from afar, one island does."""
    direct = plan_from_dict(replicas(4), SPEC)
    planned = plan_from_dict(replicas(4, ["0-1", [2, 3]]), SPEC)
    size = sum(b.owners[n].elements(r) for b in make_buckets(direct, SPEC) for n in b.names for r in b.ranks)
    found = crossing(CompiledPlan(planned, SPEC))
    assert (found.direct, found.planned, found.hops, found.buckets) == (8 * size, 4 * size, 1, 1)
    assert "1 of 1 bucket is summed inside an island first" in format_islands(CompiledPlan(planned, SPEC))


def test_islands_that_save_nothing_are_left_alone() -> None:
    for islands in ([[0], [1], [2, 3]], [[0, 1, 2, 3]]):
        plan = plan_from_dict(replicas(2, islands, tp=2), SPEC)  # only norms are on both ranks of a TP group
        assert all(len(b.hops) == 1 for b in make_buckets(plan, SPEC))


def test_islands_are_part_of_the_plan() -> None:
    plan = plan_from_dict(replicas(4, ["0-1", [3, 2]]), SPEC)
    assert plan.islands == ((0, 1), (2, 3)) and "islands: [0-1, 2-3]" in dump_yaml(plan)
    again = plan_from_dict(to_dict(plan), SPEC)
    bare = plan_from_dict(replicas(4), SPEC)
    assert again == plan != bare
    # Which way gradients travel changes neither what a checkpoint holds nor who reads what of it.
    assert again.fingerprint() == plan.fingerprint() == bare.fingerprint()


@pytest.mark.parametrize("islands, message", [([[0, 1], [1, 2]], "two islands"), ([[0, 9]], "in no stage")])
def test_wrong_islands_are_refused(islands: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        plan_from_dict(replicas(4, islands), SPEC)
    assert str(caught.value.field).startswith("islands[")


def nodes(inter: str, groups: tuple[tuple[str, int], ...] = (("a", 2),), **links: Any) -> Any:
    described = [{"name": n, "count": c, "chip": "chip", "chips_per_node": 2} for n, c in groups]
    link = {"intra_node": {"bandwidth": "2 GB/s"}, "inter_node": {"bandwidth": inter}}
    chip = {"chip": {"memory": "8 GiB", "emulate": {"speed": 1.0}}}
    return cluster_from_dict({"version": 1, "nodes": described, "chips": chip, "links": link | links})


def test_islands_of_a_cluster() -> None:
    plan = plan_from_dict(replicas(4), SPEC)
    assert add_islands(plan, SPEC, nodes("50 MB/s")).islands == ((0, 1), (2, 3))
    assert add_islands(plan, SPEC, nodes("2 GB/s")) is plan  # no link is slower than another
    named = replace(plan, islands=((0, 2),))
    assert add_islands(named, SPEC, nodes("50 MB/s")) is named
    uneven = [{"between": ["a", "b"], "bandwidth": "5 MB/s"}]
    eight = plan_from_dict(replicas(8), SPEC)  # two vendors of two nodes each: the slow link between vendors decides
    assert add_islands(eight, SPEC, nodes("1 GB/s", (("a", 2), ("b", 2)), pairs=uneven)).islands == (
        (0, 1, 2, 3), (4, 5, 6, 7),
    )  # fmt: skip


def test_files_runs_and_searches_have_the_same_islands(tmp_path: Path) -> None:
    cluster = nodes("50 MB/s")
    (tmp_path / "p.json").write_text(json.dumps(replicas(4) | {"version": 1}))
    (tmp_path / "m.json").write_text(json.dumps(MODEL))
    (tmp_path / "runs.csv").write_text(f"plan,model,seconds\np.json,{tmp_path / 'm.json'},1\n")
    read = load_plan(tmp_path / "p.json", SPEC, cluster)
    assert read == load_plan(tmp_path / "p.json", SPEC) and read.islands == ()  # reading adds nothing
    added, said = add_islands(read, SPEC, cluster), list[str]()
    assert added.islands == ((0, 1), (2, 3)) and added.fingerprint() == read.fingerprint()
    assert [run.plan for run in read_runs(str(tmp_path / "runs.csv"), cluster, said.append)] == [added]
    assert len(said) == 1 and "runs.csv:2: islands 0-1 | 2-3 added" in said[0]
    found = search(PlanningProblem(SPEC, cluster, 8, 8, SearchOptions(dtype="fp32")))
    several = [c for c in (found.best, *found.others) if len(c.plan.pipelines) > 1]
    assert several
    for choice in several:
        bare = replace(choice.plan, islands=())
        assert add_islands(bare, SPEC, cluster) == choice.plan


def test_two_hops_take_turns() -> None:
    """Every rank's second hop of a bucket begins after its first has ended, and the way back is the other way round."""
    plan = plan_from_dict(replicas(4, ["0-1", "2-3"]), SPEC)
    found = predict(plan, SPEC, nodes("5 MB/s"), "fp32")
    for spans, first in ((found.reduces, 0), (found.all_gathers, 1)):
        by_hop = {h: [s for s in spans if s.hop == h] for h in (0, 1)}
        assert len(by_hop[0]) == 2 * len(by_hop[1]) > 0  # an exchange per island, and one between them
        for late in by_hop[1 - first]:
            early = [s for s in by_hop[first] if s.bucket == late.bucket]
            assert max(s.end for s in early) <= late.start if first == 0 else early[0].end <= late.start


def test_two_hops_are_priced() -> None:
    """Half the bytes over the slow link: the predicted exchange of gradients takes less."""
    cluster = nodes("5 MB/s")
    costs = CostModel(SPEC, cluster, 8, "fp32", CostOptions())
    seconds = []
    for plan in (plan_from_dict(replicas(4), SPEC), plan_from_dict(replicas(4, ["0-1", "2-3"]), SPEC)):
        sync = GradSync(plan, costs)
        hops = [row for b in sync.buckets for row in sync.structure.actions(b, False)]
        seconds.append(sum(max(sync.price(m.content, 4.0, False).seconds for m in row) for row in hops))
    assert seconds[1] < 0.6 * seconds[0]


CASES = {
    "four replicas on two nodes": replicas(4, ["0-1", "2-3"]),
    "uneven islands of TP groups": replicas(4, [[0, 1, 2, 3, 4], [5, 6, 7]], tp=2),
}


@pytest.mark.parametrize("name", CASES)
def test_training_in_two_hops_equals_one_process(name: str) -> None:
    case = fixed_case(MODEL, CASES[name])
    assert any(len(b.hops) == 2 for b in make_buckets(plan_from_dict(case.plan, SPEC), SPEC))
    check_case(case, shared_pool())


def test_bytes_sent_are_those_planned() -> None:
    plan = plan_from_dict(CASES["uneven islands of TP groups"], SPEC)
    everyone = {(0, 1, 2, 3, 4), (5, 6, 7)}
    assert {g for b in make_buckets(plan, SPEC) for g in b.hops[0].groups} == everyone
    total = [sum(hop_elements(h).values()) for b in make_buckets(plan, SPEC) for h in b.hops]
    assert all(total)


def test_sync_groups_are_not_those_of_the_layers() -> None:
    """Both would meet in the last backward, in an order that depends on how fast messages are."""
    plan = plan_from_dict(replicas(1, tp=2), SPEC)
    groups = plan_groups(plan, make_buckets(plan, SPEC), SPEC)
    assert layer_groups(plan, SPEC) == {(0, 1)} and groups.count((0, 1)) == 2


def test_the_step_as_data() -> None:
    plan = plan_from_dict(replicas(4, ["0-1", "2-3"], tp=2) | {"islands": [[0, 1, 2, 3], [4, 5, 6, 7]]}, SPEC)
    buckets = make_buckets(plan, SPEC)
    schedules = step_schedules(plan, buckets)
    validate_step(plan, buckets, SPEC, schedules)
    assert format_grid(schedules[0]).split() == (
        ["stage", "0:", "F0", "B0", "REDUCE0", "REDUCE0.1", "UPDATE0", "ALL_GATHER0.1", "ALL_GATHER0"]
    )
    assert format_step(plan, buckets, SPEC).splitlines() == [
        "pipelines 0-3, 1f1b",
        "  stage 0: F0            B0            REDUCE0       REDUCE0.1     UPDATE0       ALL_GATHER0.1 ALL_GATHER0",
        "F, B: ranks 0-1 | 2-3 | 4-5 | 6-7 meet",
        "REDUCE0: ranks 0-3 | 4-7 meet",
        "REDUCE0.1: ranks 0-7 meet",
        "UPDATE0: ranks 0-7 meet",
        "ALL_GATHER0.1: ranks 0-7 meet",
        "ALL_GATHER0: ranks 0-3 | 4-7 meet",
    ]
    meet = Collectives(plan, buckets, SPEC)
    assert meet(0, Action("F", 0)) == ((0, 1),)
    assert meet(0, Action("REDUCE", 0, 0)) == ((0, 1, 2, 3),)
    assert meet(5, Action("REDUCE", 0, 1)) == meet(5, Action("UPDATE", 0)) == (tuple(range(8)),)
    seconds = simulate(schedules[0], Costs([1.0], [2.0], reduce=[0.5], update=[0.25], gather=[0.125])).step_seconds
    assert seconds == 1 + 2 + 2 * 0.5 + 0.25 + 2 * 0.125


STEP = [Action("F", 0), Action("B", 0), Action("REDUCE", 0), Action("REDUCE", 0, 1), Action("UPDATE", 0),
        Action("ALL_GATHER", 0, 1), Action("ALL_GATHER", 0)]  # fmt: skip
DAMAGED = {
    "B after REDUCE": ([0, 2, 1, 3, 4, 5, 6], "B0 comes after REDUCE0"),
    "hops swapped": ([0, 1, 3, 2, 4, 5, 6], "REDUCE0.1 comes before REDUCE0"),
    "REDUCE after the update": ([0, 1, 2, 4, 3, 5, 6], "REDUCE0.1 comes after the update"),
    "ALL_GATHER before the update": ([0, 1, 2, 3, 6, 4, 5], "ALL_GATHER0 comes before the update"),
    "ALL_GATHER hops swapped": ([0, 1, 2, 3, 4, 6, 5], "ALL_GATHER0 comes before ALL_GATHER0.1"),
    "no ALL_GATHER": ([0, 1, 2, 3, 4, 5], "REDUCE0 has no ALL_GATHER"),
    "no REDUCE": ([0, 1, 4, 6], "ALL_GATHER0 without REDUCE0"),
}


@pytest.mark.parametrize("order, message", DAMAGED.values(), ids=DAMAGED)
def test_damaged_steps_are_marked(order: list[int], message: str) -> None:
    validate(Schedule("x", (tuple(STEP),)))
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(Schedule("x", (tuple(STEP[i] for i in order),)))
    assert str(caught.value).count("<-- ERROR HERE") == 1


def swapped(schedules: tuple[Schedule, ...], at: int, a: Action, b: Action) -> tuple[Schedule, ...]:
    def swap(x: Action) -> Action:
        return {a: b, b: a}.get(x, x)

    changed = Schedule(schedules[at].name, tuple(tuple(map(swap, row)) for row in schedules[at].stages))
    return (*schedules[:at], changed, *schedules[at + 1 :])


def test_collectives_in_another_order_are_refused() -> None:
    plan = plan_from_dict(replicas(3), SPEC)
    buckets = make_buckets(plan, SPEC, 8 << 10)
    good = step_schedules(plan, buckets)
    validate_step(plan, buckets, SPEC, good)
    bad = swapped(good, 1, Action("REDUCE", 1), Action("REDUCE", 2))
    with pytest.raises(ScheduleError, match=r"rank 0: REDUCE1 .* never begins: rank 1 of them is at REDUCE2") as caught:
        validate_step(plan, buckets, SPEC, bad)
    assert str(caught.value).count("<-- ERROR HERE") == 1 and "rank 2: " in str(caught.value)


@pytest.mark.parametrize("islands", [None, ["0-2", "3-5"], ["0-3", [4, 5]]])
def test_ranks_that_meet_alike_are_checked_as_all_of_them_would_be(islands: Any) -> None:
    """With and without damage, the same verdict whether one rank stands for others or each for itself."""
    plan = plan_from_dict(replicas(6, islands), SPEC)
    buckets = make_buckets(plan, SPEC, 8 << 10)
    good, meet = step_schedules(plan, buckets), Collectives(plan, buckets, SPEC)
    assert good[0] is good[1]  # equal pipelines do the same list
    found = []
    for a, b in ((0, 0), (1, 2), (0, 1)):
        rows = {}
        for p, schedule in enumerate(swapped(good, 4, Action("REDUCE", a), Action("REDUCE", b))):
            rows.update(dict.fromkeys(plan.pipelines[p].ranks, schedule.stages[0]))
        errors = []
        for alike in (None, meet.kinds().get):
            try:
                validate_collectives(rows, meet, alike)
                errors.append("")
            except ScheduleError as error:
                errors.append(str(error))
        assert errors[0] == errors[1]
        found.append(errors[0])
    assert not found[0] and found[1] and found[2]


def test_a_plan_is_compiled_once() -> None:
    compiled = CompiledPlan(plan_from_dict(replicas(4, ["0-1", "2-3"]), SPEC), SPEC)
    assert compiled.buckets is compiled.buckets and compiled.schedules() is compiled.schedules(4)
    assert set(compiled.groups) == set(plan_groups(compiled.plan, compiled.buckets, compiled.spec))
    other = replace(compiled.plan, islands=())  # has nothing of the first one's
    assert other.fingerprint() == compiled.plan.fingerprint() and CompiledPlan(other, SPEC).buckets != compiled.buckets


@each("seed", range(40))
def test_every_random_plan_has_a_valid_step(seed: int) -> None:
    case = random_case(9000 + seed)
    spec = from_hf_config(case.model)
    plan = plan_from_dict(case.plan, spec)
    buckets = make_buckets(plan, spec, 4 << 10)
    validate_step(plan, buckets, spec, step_schedules(plan, buckets))
    for rank in plan.ranks:
        reduces, all_gathers = sync_actions(buckets, rank)
        assert len(reduces) == len(all_gathers) == sum(len(b.hops) for b in buckets if rank in b.ranks)


@pytest.mark.parametrize("seed", range(10))
def test_elements_between_ranks_are_those_of_the_pieces(seed: int) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(6, 9), rng.randint(1, 5))

    def some() -> Layout:
        rows = {r: sorted(rng.sample(range(shape[0] + 1), 2)) for r in range(rng.randint(1, 6))}
        return Layout(shape, {r: (Box((a, 0), (b, shape[1])),) for r, (a, b) in rows.items()})

    holders, owners = {"x": some(), "y": some()}, {"x": some(), "y": some()}
    hop = Hop((tuple(range(4)), (4, 5)), holders, owners)
    expected: dict[tuple[int, int], int] = {}
    for ranks in hop.groups:
        for name, layout in holders.items():
            for piece in reduction(layout.only(ranks), owners[name].only(ranks)).pieces:
                expected[piece.src, piece.dst] = expected.get((piece.src, piece.dst), 0) + piece.box.size
    assert hop_elements(hop) == expected
