"""Weights that the replicas of a stage divide: any shares and moments of gathering give the single-process result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.utils.out_of_memory import out_of_memory
from tests.support.parity import Case, check_case, fixed_case, random_case, reference, run_case, run_rank
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

SEED = int(os.environ.get("SEED", "2026"))
COUNT = int(os.environ.get("N", "16"))
QUICK = (1, 2)  # in `make test`
SLOW = (3, 5)
WAYS: list[dict[str, Any]] = [
    {"gather": "layer"}, {"gather": "layer", "reshard_after_forward": False},
    {"gather": "micro-batch"}, {"gather": "micro-batch", "reshard_after_forward": False}, {"gather": "step"},
]  # fmt: skip


def _divided(case: Case) -> bool:
    return any("weights" in s for p in case.plan["pipelines"] for s in p["stages"])


def _random(seed: int, dtype: str = "fp64") -> Case:
    """Of one pipeline, or of one to three, which hold the same layers."""
    return random_case(seed, dtype, most_pipelines=1 if seed % 2 else 3, divided=True)


def random_divided_cases() -> Iterator[Case]:
    """Of plans that divide some weights, which takes replicas or context groups."""
    return filter(_divided, map(_random, count(SEED)))


FOUND, REST = list[Case](), random_divided_cases()


def _case(index: int) -> Case:
    FOUND.extend(islice(REST, max(index + 1 - len(FOUND), 0)))
    return FOUND[index]


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_divided_plan_equals_one_process(index: int) -> None:
    """Every fourth case also runs in fp32, every eighth in bf16."""
    check_case(_case(index), shared_pool())
    for each, dtype in ((4, "fp32"), (8, "bf16")):
        case = _random(_case(index).seed, dtype)
        if index % each == 0 and _divided(case):
            check_case(case, shared_pool())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_all_moments_of_gathering_give_the_same_bits(schedule: str) -> None:
    """A micro-batch of 4 rows, and a last one of 2, of which one replica has none; the head's matrix is the
    embedding's; a TP pair and its replica keep unlike shares, one of them nothing; another pipeline cuts the model
    elsewhere."""
    bits = []
    for way in WAYS:
        first = stage([0, 1], [0, 1], dp_split=[3, 1], weights={"shard": [1, 3], **way})
        second = stage([2, 3, 4, 5], [1, 3], tp=2, dp_split=[3, 1], weights={"shard": [2, 0, 1, 1], **way})
        other = pipe(2, 2, stage([6, 7], [0, 3], dp_split=[1, 1], weights={"shard": [2, 3], **way}))
        case = fixed_case(LLAMA, plan([pipe(4, 3, first, second), other], schedule=schedule))
        _, ranks = run_case(case, shared_pool())
        bits.append(ranks)
    for way, other in zip(WAYS[1:], bits[1:], strict=True):
        for mine, theirs in zip(bits[0], other, strict=True):
            assert mine["losses"] == theirs["losses"] and mine["norms"] == theirs["norms"], way
            for kind in ("grads", "weights"):
                for (name, box, a), (_, there, b) in zip(mine[kind], theirs[kind], strict=True):
                    assert box == there and np.array_equal(a, b), f"{kind} of {name}, {way}"


def test_a_rank_without_rows_still_gathers() -> None:
    """A batch that is no multiple of the micro-batch: in its last one a replica has nothing to compute."""
    for way in (WAYS[0], WAYS[2]):
        tied = LLAMA | {"tie_word_embeddings": True}
        divided = stage([0, 1, 2], [0, 3], dp_split=[2, 1, 1], weights={"shard": [0, 1, 4], **way})
        check_case(fixed_case(tied, plan([pipe(4, 2, divided)])), shared_pool())


def without_memory(comm: Comm, *args: Any) -> str:
    """What a rank is told whose device has no memory for weights that come back."""

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if size:
            torch.empty(1 << 62, dtype=torch.int8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize)
        try:
            run_rank(comm, *args)
        except RuntimeError as error:
            return str(out_of_memory(error, comm.rank))
    return ""


def test_a_gather_without_memory_names_layer_bytes_and_the_choice_that_needs_less() -> None:
    for way, choice in ((WAYS[0], "a smaller share for this rank"), (WAYS[1], "reshard_after_forward: true"),
                        (WAYS[2], "gather: layer")):  # fmt: skip
        divided = stage([0, 1], [0, 3], dp_split=[1, 1], weights={"shard": [1, 3], **way})
        case = fixed_case(LLAMA, plan([pipe(2, 2, divided)]))
        _, spec, initial = reference(case, torch.float64)
        arrays = {name: tensor.numpy() for name, tensor in initial.items()}
        told = shared_pool().run(without_memory, case, plan_from_dict(case.plan, spec), spec, arrays)[:2]
        for rank, text in enumerate(told):
            assert f"rank {rank} is out of host memory in gathering the weights of the embedding (" in text
            assert "iB), which its stage divides: " in text and choice in text
