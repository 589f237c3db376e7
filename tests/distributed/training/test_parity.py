"""The central law: any plan gives the single-process result. Proven in fp64 against Hugging Face models."""

from __future__ import annotations

import os

import pytest

from hetero_megatron.spec import Dropout
from tests.support.parity import check_case, fixed_case, random_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

SEED = int(os.environ.get("SEED", "2026"))
COUNT = int(os.environ.get("N", "28"))
QUICK = (0, 1, 3, 5)  # in `make test`
SLOW = (7, 8, 12)

@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_plan_equals_one_process(index: int) -> None:
    """Every fourth case also runs in fp32, every eighth in bf16."""
    check_case(random_case(SEED + index, divided=True), shared_pool())
    if index % 4 == 0:
        check_case(random_case(SEED + index, "fp32", divided=True), shared_pool())
    if index % 8 == 1:
        check_case(random_case(SEED + index, "bf16", divided=True), shared_pool())


HAND_WRITTEN = {
    # HexiScale weights replicas wrongly when batch shares and TP degrees differ.
    "unequal_batch_and_tp": fixed_case(
        LLAMA,
        plan([pipe(2, 3, stage([0, 1], [0, 2], tp=2), stage([2], [2, 3], tp=1)), pipe(1, 1, stage([3], [0, 3], tp=1))]),
    ),
    # Tied embeddings whose first and last stages have unlike inner data parallelism.
    "tied_unlike_dp": fixed_case(
        LLAMA | {"tie_word_embeddings": True},
        plan(
            [
                pipe(
                    4,
                    2,
                    stage([0, 1, 2], [0, 1], tp=1, dp_split=[1, 2, 1]),
                    stage([3, 4], [1, 3], tp=2, tp_split=[1, 2]),
                )
            ]
        ),
    ),
    # FlagScale adds a rank's norm several times when neighbouring meshes differ in DP; clipping must see the true norm.
    "norm_unlike_dp": fixed_case(
        LLAMA,
        plan(
            [
                pipe(
                    4,
                    2,
                    stage([0, 1, 2, 3], [0, 2], tp=1, dp_split=[1, 1, 1, 1]),
                    stage([4, 5], [2, 3], tp=1, dp_split=[2, 2]),
                )
            ]
        ),
        clip_grad=0.01,
    ),
    # Megatron once trained 28 layers when asked for 30 over 4 stages.
    "thirty_layers_four_stages": fixed_case(
        LLAMA | {"num_hidden_layers": 30},
        plan([pipe(1, 5, stage([0], [0, 8]), stage([1], [8, 16]), stage([2], [16, 23]), stage([3], [23, 30]))]),
    ),
    "no_decoder_layer_first_and_last": fixed_case(
        LLAMA, plan([pipe(1, 4, stage([0], []), stage([1, 2], [0, 3], tp=2), stage([3], []))])
    ),
    "tp_two_beside_three": fixed_case(
        LLAMA,
        plan([pipe(2, 2, stage([0, 1, 2], [0, 3], tp=3)), pipe(1, 3, stage([3, 4], [0, 3], tp=2, tp_split=[2, 1]))]),
    ),
    "vocabulary_divides_by_nothing": fixed_case(
        LLAMA | {"vocab_size": 41}, plan([pipe(1, 2, stage([0, 1, 2, 3], [0, 3], tp=4, tp_split=[1, 2, 3, 1]))])
    ),
    "more_ranks_than_kv_heads": fixed_case(
        LLAMA | {"num_key_value_heads": 1}, plan([pipe(1, 2, stage([0, 1, 2, 3], [0, 3], tp=4))])
    ),
    # Ranks count as listed, not as sorted: here shares of heads, vocabulary and tokens differ along the TP group.
    "tp_descending": fixed_case(LLAMA, plan([pipe(1, 2, stage([2, 1, 0], [0, 3], tp=3, tp_split=[1, 2, 3]))])),
    "inner_replicas_interleaved": fixed_case(
        LLAMA,
        plan([pipe(3, 2, stage([3, 0, 1, 2], [0, 2], tp=2, tp_split=[3, 1], dp_split=[1, 2]), stage([4], [2, 3]))]),
    ),
    "stages_and_pipelines_backwards": fixed_case(
        LLAMA | {"tie_word_embeddings": True},
        plan([pipe(1, 3, stage([5, 3], [0, 1], tp=2), stage([4], [1, 3])), pipe(2, 1, stage([2, 0, 1], [0, 3], tp=3))]),
    ),
    "context_members_that_are_tp_groups": fixed_case(
        LLAMA,
        plan([pipe(1, 2, stage([0, 1, 2, 3, 4, 5], [0, 3], tp_split=[2, 1], kv={"block": 2}, context=[
            {"ranks": [[5, 2], [3, 0]], "tokens": [4, 2], "heads": [2, 4]},
            {"ranks": [[1, 4]], "tokens": [4], "heads": [6]},
        ]))]),
    ),
    "context_groups_gathered": fixed_case(
        LLAMA,
        plan([pipe(1, 2, stage([0, 1, 2, 3], [0, 3], kv={"transport": "gather"}, context=[
            {"ranks": [3, 1], "tokens": [5, 1], "heads": [1, 5]},
            {"ranks": [2, 0], "tokens": [1, 3], "heads": [4, 2]},
        ]))]),
    ),
    # Uneven chunks, one of them empty, TP beside none, and micro-batches that are no multiple of the stages.
    "chunks_of_unequal_stages": fixed_case(
        LLAMA | {"num_hidden_layers": 7},
        plan([pipe(2, 5, stage([0, 1], [[0, 2], [3, 3]], tp=2, tp_split=[2, 1], recompute="full"),
                   stage([2], [[2, 3], [3, 7]], recompute={"first": 2}))], schedule="interleaved"),
    ),
    "chunks_of_three_stages_and_replicas": fixed_case(
        LLAMA | {"num_hidden_layers": 8, "tie_word_embeddings": True},
        plan([pipe(1, 7, stage([3], [[0, 1], [3, 5], [7, 8]]), stage([1], [[1, 2], [5, 6], [8, 8]]),
                   stage([0, 2], [[2, 3], [6, 7], [8, 8]], tp=2)),
              pipe(2, 2, stage([4, 5], [0, 8], tp=1, dp_split=[1, 1]))], schedule="interleaved"),
    ),
    # Embedding and head are one tensor in two chunks of one stage, between which nothing is sent.
    "chunks_on_one_stage": fixed_case(
        LLAMA | {"tie_word_embeddings": True},
        plan([pipe(2, 3, stage([0, 1], [[0, 1], [1, 1], [1, 3]], tp=2))], schedule="interleaved"),
    ),
    "zero_bubble_tied_on_one_stage": fixed_case(
        LLAMA | {"tie_word_embeddings": True}, plan([pipe(2, 3, stage([0, 1], [0, 3], tp=2))], schedule="zero-bubble")
    ),
    "zero_bubble_of_unequal_stages": fixed_case(
        LLAMA | {"tie_word_embeddings": True},
        plan([pipe(2, 5, stage([0, 1], [0, 1], tp=2, tp_split=[2, 1], recompute="full"),
                   stage([2], [1, 2], recompute="selective"), stage([3, 4], [2, 3], tp=1, dp_split=[1, 1])),
              pipe(1, 2, stage([5], [0, 3], recompute={"first": 1}))], schedule="zero-bubble"),
    ),
    "zero_bubble_over_uneven_chunks": fixed_case(
        LLAMA | {"num_hidden_layers": 7, "tie_word_embeddings": True},
        plan([pipe(2, 5, stage([0, 1], [[0, 2], [3, 3]], tp=2, tp_split=[2, 1], recompute="full"),
                   stage([2], [[2, 3], [3, 7]], recompute={"first": 2})) | {"in_flight": [3, 1]},
              pipe(1, 2, stage([3], [0, 7]))], schedule="zero-bubble"),
    ),
    "zero_bubble_with_context_groups": fixed_case(
        LLAMA,
        plan([pipe(1, 3, stage([0, 1, 2], [0, 2], recompute="full", context=[
            {"ranks": [2, 0], "tokens": [4, 3], "heads": [2, 4]}, {"ranks": [1], "tokens": [3], "heads": [6]},
        ]), stage([3], [2, 3]))], schedule="zero-bubble"),
    ),
}  # fmt: skip


IN_MAKE_TEST = (
    "vocabulary_divides_by_nothing", "inner_replicas_interleaved", "stages_and_pipelines_backwards",
    "context_groups_gathered", "chunks_on_one_stage", "zero_bubble_with_context_groups",
)  # fmt: skip


@pytest.mark.parametrize("name", quick(HAND_WRITTEN, IN_MAKE_TEST))
@pytest.mark.parametrize("packed", quick([False, True], [True], []))
def test_cases_that_peers_get_wrong(name: str, packed: bool) -> None:
    from dataclasses import replace

    rates = Dropout(0.25, 0.25) if packed else Dropout()
    check_case(replace(HAND_WRITTEN[name], packed=packed, masked=packed, dropout=rates), shared_pool())
