"""What a model that fits in no plan is refused with: what is missing, by how much, and on which chips."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import load_model

NODES = {
    "nodes": [
        {"name": "ampere", "chip": "A100-80-SXM", "chips_per_node": 4},
        {"name": "ada", "chip": "L40S", "chips_per_node": 2},
    ],
    "links": {"inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
}


ALL = SearchSpace()


def refusal(model: str, seq_length: int, space: SearchSpace = ALL, memory: dict[str, str] | None = None) -> str:
    chips = {name: {"memory": size} for name, size in (memory or {}).items()}
    problem = PlanningProblem(
        load_model(model), cluster_from_dict({**NODES, "chips": chips}), seq_length, 8, SearchOptions(space=space)
    )
    with pytest.raises(UserError) as caught:
        search(problem)
    return str(caught.value)


@pytest.mark.slow
def test_states_that_are_too_large_are_named_with_what_every_chip_lacks() -> None:
    """With the memory that it asks for, the model fits."""
    space = SearchSpace(offload="never", more_schedules="never", context="never")
    told = refusal("llama2-70b", 2048, space)
    assert "weights 128.5 GiB, gradients 257 GiB, optimizer 770.9 GiB" in told and "too little" in told
    more = re.findall(r"([\d.]+) GiB more than its (\d+) GiB on each ([\w-]+)", told)
    assert [name for *_, name in more] == ["A100-80-SXM", "L40S"]
    enough = {name: f"{float(added) + float(has) + 1} GiB" for added, has, name in more}
    chips = {name: {"memory": size} for name, size in enough.items()}
    problem = PlanningProblem(load_model("llama2-70b"), cluster_from_dict({**NODES, "chips": chips}), 2048, 8)
    assert search(replace(problem, options=SearchOptions(space=space))).best.step_seconds > 0


@pytest.mark.slow
def test_activations_that_are_too_large_are_named_with_the_layers_that_fit() -> None:
    space = SearchSpace(context="never", recompute="none", max_tp=1)
    told = refusal("llama3.1-8b", 131072, space)
    assert "of micro-batches of 1 x 131072 tokens" in told and "activations are what is missing" in told
    assert "GiB more than its 48 GiB on each L40S" in told


def test_chips_without_room_for_any_model_are_named() -> None:
    told = refusal("tiny", 64, memory={"A100-80-SXM": "512 MiB", "L40S": "8 MiB"})
    assert "framework and communicators alone take 1 GiB of the 481.3 MiB to use on each A100-80-SXM" in told
    assert "-" not in told.partition("alone take")[2].replace("A100-80-SXM", "")
