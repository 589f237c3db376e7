"""What copies of activations to host memory add to a step: nothing where they are hidden, else what the links take."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.memory.micro_batches import host_layers
from hetero_megatron.predictor.cost.link_model import waits_coming, waits_leaving
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support.small_plans import pipe, plan, stage

SPEC = replace(load_model("tiny"), hidden_size=512, ffn_hidden_size=1536)


def queue(begins: list[float], copies: list[float]) -> list[float]:
    """Ends of copies on one link: a definition without the code in question."""
    ends: list[float] = []
    for begin, seconds in zip(begins, copies, strict=True):
        ends.append(max(begin, ends[-1] if ends else 0.0) + seconds)
    return ends


def test_hidden_copies_cost_nothing_and_others_what_the_link_takes() -> None:
    assert waits_leaving([0.9] * 6, 1.0, 1) == waits_coming([0.9] * 6, [1.0] * 6, 1, 0.9) == 0.0
    assert waits_coming([0.9] * 6, [1.0] * 6, 1, 0.0) == pytest.approx(0.9)  # nothing hides the first one
    assert waits_leaving([3.0] * 6, 1.0, 1) == pytest.approx(1.0 + 5 * 3.0 - 6 * 1.0)  # the last one goes on alone
    assert waits_coming([3.0] * 6, [1.0] * 6, 1, 0.0) == pytest.approx(6 * 3.0 + 1.0 - 6 * 1.0)
    assert waits_coming([3.0, 0.0, 0.0], [1.0] * 3, 1, 5.0) == pytest.approx(2.0)  # asked for by the next layer
    assert waits_leaving([], 1.0, 1) == waits_coming([], [], 1, 1.0) == 0.0


def test_waits_of_any_copies() -> None:
    rng = random.Random(51)
    for _ in range(200):
        count, forward, head = rng.randint(1, 8), rng.random(), rng.random()
        copies, backward = ([rng.choice([0.3, 1, 2]) * rng.random() for _ in range(count)] for _ in range(2))
        out = [waits_leaving(copies, forward, ahead) for ahead in (1, 2, 3, 99)]
        back = [waits_coming(copies, backward, ahead, head) for ahead in (1, 2, 3, 99)]
        for waits in (out, back):
            assert all(a >= b - 1e-12 >= -2e-12 for a, b in zip(waits, waits[1:])), "more under way, shorter waits"
            assert waits[0] <= sum(copies) + 1e-12
        assert out[-1] == 0.0  # nobody waits for any
        ends, now = queue([0.0] * count, copies[::-1]), head  # all of them are asked for at once
        for end, seconds in zip(ends, backward[::-1], strict=True):
            now = max(now, end) + seconds
        assert back[-1] == pytest.approx(now - head - sum(backward))


def made(activations: Any, recompute: str = "none") -> Plan:
    away = {} if activations is None else {"activations": activations}
    stages = (stage([0], [0, 3], recompute=recompute, **away), stage([1], [3, 6], recompute=recompute, **away))
    return plan_from_dict(plan([pipe(1, 4, *stages)], 512), SPEC)


def seconds(found: Plan, host: str, emulated: bool = False) -> float:
    chip: dict[str, Any] = {"memory": "8 GiB", "tflops": {"fp32": 1}, "memory_bandwidth": "50 GB/s"}
    chip |= {"host_bandwidth": host} | ({"emulate": {"speed": 0.5}} if emulated else {})
    nodes = [{"name": "n", "count": 2, "chip": "c"}]
    links = {"inter_node": {"bandwidth": "10 GB/s"}}
    cluster = cluster_from_dict({"version": 1, "chips": {"c": chip}, "nodes": nodes, "links": links})
    return predict(found, SPEC, cluster, "fp32").step_seconds


def test_a_step_is_longer_where_the_host_link_is_slow() -> None:
    for recompute in ("none", "elementwise", "full"):
        plain, away = made(None, recompute), made({"offload": "all"}, recompute)
        assert seconds(plain, "1 GB/s") == seconds(plain, "10 GB/s")
        times = [seconds(away, f"{rate} GB/s") for rate in (1e6, 20, 1, 0.2)]
        assert times[0] == pytest.approx(seconds(plain, "1 GB/s"), rel=1e-4), recompute
        assert times == sorted(times) and times[-1] > times[0], recompute
        assert seconds(made({"offload": {"first": 1}}, recompute), "0.2 GB/s") < times[-1], recompute
    assert seconds(made({"offload": "all"}), "0.2 GB/s", emulated=True) > seconds(made(None), "1 GB/s", emulated=True)


def test_bytes_of_layers_are_what_the_memory_formula_adds_up() -> None:
    from hetero_megatron.plans.memory.of_plan import estimate_memory

    found = made({"offload": {"first": 2}})
    for rank, flying in ((0, 2), (1, 1)):  # 1F1B
        ((layers,),) = [host_layers(found.stages[rank], SPEC, 512, 4)[rank]]
        assert layers[2] == 0 and flying * sum(layers) == estimate_memory(found, SPEC, "fp32")[rank].host
