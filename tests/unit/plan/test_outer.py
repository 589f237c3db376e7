"""The key ``outer`` of a plan: what it may say, what is refused, what it needs, and what predictions make of it."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from hetero_megatron.cluster.cluster_file import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.dump import dump_yaml, to_dict
from hetero_megatron.plans.export import export
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.plans.outer import (
    bytes_per_exchange,
    exchanged,
    format_outer,
    fragment_tensors,
    outer_memory,
    owners_by_island,
    plan_of_islands,
)
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.step import StepSimulator
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.spec.lora import Lora
from tests.unit.plan.test_bad_input import small_spec

OUTER = {"islands": ["0-2", [3]], "every": 12, "fragments": 3, "delay": 2, "mixing": 0.25}
PIPELINES = [
    {"micro_batch_size": 1, "num_micro_batches": 3, "stages": [
        {"ranks": [0, 1], "layers": [0, 4], "tp": 2}, {"ranks": 2, "layers": [4, 6]}]},
    {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{"ranks": 3, "layers": [0, 6]}]},
]  # fmt: skip


def outer_plan(spec: ModelSpec, **changes: Any) -> Plan:
    outer = {key: value for key, value in (OUTER | changes).items() if value is not None}
    return plan_from_dict(
        {"seq_length": 32, "global_batch_size": 4, "outer": outer, "pipelines": PIPELINES}, spec
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"every": None}, "outer.every: key 'every' is missing"),
    ({"evry": 4}, "outer.evry: unknown key"),
    ({"every": 0}, "outer.every = 0: too small"),
    ({"every": 4.5}, "outer.every = 4.5: an integer was expected"),
    ({"every": 10}, "outer.every = 10: 3 fragments cannot be exchanged at equal distances in 10 steps. Acc"),
    ({"every": 1 << 30}, "outer.every = 1073741824: too large"),
    ({"fragments": 0}, "outer.fragments = 0: too small"),
    ({"fragments": 12}, "outer.fragments = 12: the model has 6 layers. Accepted: 1 to 6"),
    ({"delay": 4}, "outer.delay = 4: the next exchange begins 4 steps after this one. Accepted: 0 to 3"),
    ({"delay": -1}, "outer.delay = -1: too small"),
    ({"mixing": 1.5}, "outer.mixing = 1.5: out of range. Accepted: a number from 0 to 1"),
    ({"mixing": float("nan")}, "outer.mixing = nan: out of range"),
    ({"mixing": "half"}, "outer.mixing = half: a number was expected, not text"),
    ({"islands": ["0-2"]}, "outer.islands = 3: rank 3 is in none"),
    ({"islands": ["0-2", "2-3"]}, "outer.islands = 2: rank 2 is in two islands"),
    ({"islands": ["0-2", "3-4"]}, "outer.islands = 4: rank 4 is in no stage"),
    ({"islands": ["0-1", "3"]}, "outer.islands = 2: rank 2 is in none"),
    ({"islands": ["0-1", "2-3"]}, "pipeline 0 (ranks 0-2) lies in several. Accepted: islands of whole pipelines"),
    ({"optimizer": {"name": "adam"}}, "outer.optimizer.name = adam: unknown choice. Accepted: one of sgd"),
    ({"optimizer": {"momentum": 1}}, "outer.optimizer.momentum = 1: nothing would ever be forgotten"),
    ({"optimizer": {"momentum": 0, "nesterov": True}}, "outer.optimizer.nesterov = True: there is no momentum"),
    ({"optimizer": {"lr": 0}}, "outer.optimizer.lr = 0: the global weights would never move"),
    ({"optimizer": {"lr": 1e9}}, "outer.optimizer.lr = 1000000000.0: out of range"),
    ({"optimizer": {"rate": 1}}, "outer.optimizer.rate: unknown key"),
    ({"compress": "int3"}, "outer.compress = int3: unknown choice. Accepted: one of none, bf16, int8, int4"),
    ({"compress": 8}, "outer.compress = 8: unknown choice. Accepted: one of none"),
    ({"compress": False}, "outer.compress = False: unknown choice"),
    ({"compress": {"bits": 8}}, "outer.compress"),
    ({"compres": "int8"}, "outer.compres: unknown key"),
]


def test_what_cannot_be_is_refused_in_one_line() -> None:
    spec = small_spec()
    for changes, says in REFUSED:
        with pytest.raises(UserError) as caught:
            outer_plan(spec, **changes)
        assert says in str(caught.value) and "\n" not in str(caught.value), (changes, str(caught.value))
    with pytest.raises(UserError, match=re.escape("outer = 2 islands: there are no outer steps for adapters (LoRA)")):
        outer_plan(replace(spec, lora=Lora(4, 8.0)))


def test_a_plan_with_outer_steps_is_another_plan_and_survives_writing() -> None:
    spec = small_spec()
    rates = {"name": "sgd", "lr": 0.7, "momentum": 0.9}
    plan, like = outer_plan(spec), outer_plan(spec, islands=[3, [2, 0, 1]], optimizer=rates)
    assert plan == like and plan.fingerprint() == like.fingerprint() == outer_plan(spec, optimizer={}).fingerprint()
    assert plan_from_dict(to_dict(plan), spec) == plan and plan_from_dict(yaml.safe_load(dump_yaml(plan)), spec) == plan
    others = [{"every": 24}, {"fragments": 2}, {"delay": 1}, {"mixing": 0}, {"optimizer": {"momentum": 0}}]
    others += [{"compress": kind} for kind in ("bf16", "int8", "int4")]
    prints = {outer_plan(spec, **changes).fingerprint() for changes in others} | {plan.fingerprint()}
    assert len(prints | {replace(plan, outer=None).fingerprint()}) == len(others) + 2
    exact = outer_plan(spec, compress="none")
    assert exact == plan and exact.fingerprint() == plan.fingerprint()
    narrow = outer_plan(spec, compress="int4")
    assert plan_from_dict(yaml.safe_load(dump_yaml(narrow)), spec) == narrow
    assert " to each other island, in int4 with error feedback, for 2 steps" in format_outer(narrow, spec, "bf16")[1]
    told = "\n".join(format_outer(plan, spec, "bf16"))
    assert "notice: outer steps: islands 0-2 | 3" in told and "the loss depends on the plan" in told


def test_fragments_are_all_tensors_once_and_islands_own_all() -> None:
    spec = small_spec()
    plan = outer_plan(spec)
    assert plan.outer is not None
    fragments = fragment_tensors(spec, plan.outer)
    sizes = {t.name: t.size for t in logical_tensors(spec)}
    assert sorted(name for names in fragments for name in names) == sorted(sizes)
    assert [sorted({n.split(".")[2] for n in names if ".layers." in n}) for names in fragments] == [
        ["0", "1"], ["2", "3"], ["4", "5"]
    ]  # fmt: skip
    assert sum(bytes_per_exchange(plan, spec, 4)) == 4 * sum(sizes.values())
    for ranks in plan.outer.islands:
        buckets = [b for b in CompiledPlan(plan, spec).buckets if b.ranks[0] in ranks]
        assert all(set(b.ranks) <= set(ranks) for b in buckets)
        assert sum(int(b.counts()[1].sum()) for b in buckets) == sum(sizes.values())


def test_memory_is_that_of_global_weights_momentum_and_what_was_lost() -> None:
    """Beside that of optimizers which no other island shares; exact, and as a rank allocates it."""
    spec = small_spec()
    for momentum, compress, copies in ((0.9, "none", 2), (0.0, "none", 1), (0.9, "int8", 3), (0.0, "bf16", 2)):
        plan = outer_plan(spec, optimizer={"momentum": momentum}, delay=0, compress=compress)
        owned = dict.fromkeys(plan.ranks, 0)
        for bucket in CompiledPlan(plan, spec).buckets:
            for rank, count in zip(bucket.ranks, bucket.counts()[1].tolist(), strict=True):
                owned[rank] += count
        for rank, memory in estimate_memory(plan, spec, "bf16").items():
            assert memory.optimizer == owned[rank] * (4 + 4 + 4 + 4 * copies)  # masters, two moments


def test_bytes_of_an_exchange_are_told_by_hand() -> None:
    """Of one tensor [2, 130] that two ranks of an island have cut at column 70, or between its rows."""
    spec = small_spec()
    whole = Layout((2, 130), {3: (Box((0, 0), (2, 130)),)})
    by_column = {0: (Box((0, 0), (2, 70)),), 1: (Box((0, 70), (2, 130)),)}
    by_row = {0: (Box((0, 0), (1, 130)),), 1: (Box((1, 0), (2, 130)),)}
    known = {  # elements of each, and blocks: columns 0-63, 64-127, 128-129
        "none": ((4 * 140, 4 * 120), (4 * 130, 4 * 130)), "bf16": ((280, 240), (260, 260)),
        "int8": ((140 + 4 * 4, 120 + 4 * 4), (130 + 4 * 3,) * 2), "int4": ((70 + 4 * 4, 60 + 4 * 4), (65 + 4 * 3,) * 2),
    }  # fmt: skip
    for compress, sizes in known.items():
        outer = outer_plan(spec, compress=compress).outer
        assert outer is not None
        for boxes, (first, second) in zip((by_column, by_row), sizes, strict=True):
            found = exchanged(outer, [{"x": Layout((2, 130), boxes)}, {"x": whole}], ["x"], 4)
            assert found == {(0, 3): first, (3, 0): first, (1, 3): second, (3, 1): second}, compress


def test_memory_of_an_exchange_is_what_travels_with_differences_and_sums() -> None:
    spec = small_spec()
    sizes = {}
    for compress in ("none", "bf16", "int8", "int4"):
        plan = outer_plan(spec, compress=compress, fragments=1)
        assert plan.outer is not None
        compiled, names = CompiledPlan(plan, spec), [t.name for t in logical_tensors(spec)]
        travels = exchanged(plan.outer, owners_by_island(plan.outer, compiled.buckets), names, 4)
        for rank, (_, passing) in outer_memory(plan, spec, compiled.buckets, 4).items():
            owned = sum(layout.elements(rank) for b in compiled.buckets for layout in b.owners.values())
            assert passing == 8 * owned + sum(size for pair, size in travels.items() if rank in pair)
        sizes[compress] = sum(travels.values())
    assert sizes["none"] == 2 * sizes["bf16"] > 3 * sizes["int8"] and sizes["int4"] < 0.6 * sizes["int8"]


def test_predictions_count_what_is_exchanged() -> None:
    """Over links of nothing but bandwidth: the model's bytes each way in ``every`` steps, less what computing hides."""
    spec = small_spec()
    cluster = cluster_from_dict({
        "nodes": [{"name": "near", "chip": "A100-40-SXM", "chips_per_node": 3}, {"name": "far", "chip": "A100-40-SXM"}],
        "links": {"intra_node": {"bandwidth": "100 GB/s", "latency": "0 us"},
                  "inter_node": {"bandwidth": "1 MB/s", "latency": "0 us"}},
    })  # fmt: skip
    seconds = {}
    for delay, compress in ((0, "int8"), (0, "none"), (2, "none")):
        plan = outer_plan(spec, delay=delay, compress=compress)
        found = StepSimulator(plan, CostModel(spec, cluster, plan.seq_length, "fp32")).prediction()
        assert found.step_seconds == pytest.approx(sum(found.parts.values()))
        seconds[delay, compress] = found.parts["outer"]
        inner = found.step_seconds - found.parts["outer"]
    size = sum(bytes_per_exchange(plan, spec, 4))
    assert seconds[0, "none"] == pytest.approx(size / (0.8 * 1e6) / 12, rel=0.01)  # of links that are not measured
    assert seconds[2, "none"] == pytest.approx(seconds[0, "none"] - 2 * inner * 3 / 12, rel=0.01)
    narrow = sum(bytes_per_exchange(outer_plan(spec, compress="int8"), spec, 4))
    assert seconds[0, "int8"] == pytest.approx(narrow / (0.8 * 1e6) / 12, rel=0.02)  # boxes may cut blocks
    with pytest.raises(UserError, match="sailor cannot say outer steps"):
        export("sailor", plan, spec, cluster, "fp32")


def test_islands_that_are_left_share_the_batch() -> None:
    """As evenly as whole micro-batches can, by trying all; ranks have new numbers, and stored orders are dropped where
    they are of other numbers of micro-batches."""
    spec, rng = small_spec(), random.Random(5)
    impossible = 0
    for _ in range(60):
        sizes = [(rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 4)) for _ in range(rng.randint(2, 4))]
        pipelines = [
            {"micro_batch_size": size, "num_micro_batches": count, "stages": [{"ranks": rank, "layers": [0, 6]}]}
            for rank, (size, count) in enumerate(sizes)
        ]
        batch = sum(size * count for size, count in sizes)
        outer = {"islands": [[rank] for rank in range(len(sizes))], "every": 2}
        whole = plan_from_dict(
            {"seq_length": 32, "global_batch_size": batch, "outer": outer, "pipelines": pipelines}, spec
        )
        kept = sorted(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))))
        new = list(range(len(kept)))
        rng.shuffle(new)
        left = plan_of_islands(whole, kept, dict(zip(kept, new, strict=True)))
        choices = itertools.product(*(range(sizes[i][1], batch // sizes[i][0] + 1) for i in kept))
        fitting = [c for c in choices if sum(n * sizes[i][0] for n, i in zip(c, kept, strict=True)) == batch]
        growth = [max(n / sizes[i][1] for n, i in zip(counts, kept, strict=True)) for counts in fitting]
        impossible += not fitting
        if left is None:
            assert not fitting
            continue
        assert left.outer is not None and sorted(left.ranks) == [*range(len(kept))]
        assert sum(p.batch_size for p in left.pipelines) == left.global_batch_size == batch
        assert [p.ranks for p in left.pipelines] == [(rank,) for rank in new]
        found = max(p.num_micro_batches / sizes[i][1] for p, i in zip(left.pipelines, kept, strict=True))
        assert found <= min(growth) + 1e-9
        assert plan_from_dict(to_dict(left), spec) == left
        if len(kept) == len(sizes) and new == kept:
            assert left == whole
    assert impossible
