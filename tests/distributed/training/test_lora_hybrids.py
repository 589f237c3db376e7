"""LoRA on linear attention and on several projections in one matrix: values and gradients are peft's, fp64."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.spec import Lora
from hetero_megatron.spec.adapter_modules import all_modules
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import Sites
from tests.distributed.training.test_lora import check
from tests.support.families import DENSE
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.parity import Case
from tests.support.peft_reference import targets_outside_experts
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

ALL: dict[str, dict[str, Any]] = HYBRIDS | MAMBAS


def cut(layers: int, split: list[int], **more: Any) -> list[dict[str, Any]]:
    """Uneven tensor parallelism before a stage of the last layer."""
    ranks = list(range(len(split)))
    return [stage(ranks, [0, layers - 1], tp=len(split), tp_split=split, **more),
            stage([len(split)], [layers - 1, layers])]  # fmt: skip


@pytest.mark.parametrize("family", quick([*ALL], ["granite_hybrid"], ["qwen3_next"]))
def test_hybrids(family: str) -> None:
    """Every matrix that may have an adapter, under TP of 2 and 3 and two stages, and recompute."""
    config, number = ALL[family], [*ALL].index(family)
    spec = from_hf_config(config)
    split, kinds = [2, 1] if number // 2 % 2 else [2, 1, 1], ["none", "full", "selective", "elementwise"]
    stages = cut(spec.num_layers, split, recompute=kinds[number % 4])
    made = plan([pipe(2, 2, *stages)])
    lora = Lora(3, 5.0, tuple(targets_outside_experts(spec)), rslora=number % 2 == 1, dropout=0.3 * (number % 4 == 2))
    check(config, made, lora, Case(number, 4, config, made, optimizer="sgd" if number % 2 else "adamw"))


@pytest.mark.parametrize("dora", quick([False, True], [False]))
def test_experts_without_gates(dora: bool) -> None:
    """Divided unequally, and one member's by columns; beside Mamba-2's where peft knows that."""
    config = ALL["nemotron_h_experts"]
    experts = [{"ranks": [[0, 2], 1], "experts": [[0, 2], [2, 5]], "split": [[2, 1], [1]]}]
    made = plan([pipe(3, 2, stage([0, 1, 2], [0, 2], tp=3, tp_split=[2, 1, 1], experts=experts), stage([3], [2, 3]))])
    lora = Lora(2, 5.0, ("up_proj", "down_proj", "o_proj", *(() if dora else ("in_proj",))), dora=dora)
    check(config, made, lora, Case(1, 4, config, made))


@pytest.mark.parametrize("case", quick(["context", "zero-bubble", "sites", "int8"], [], ["int8"]))
def test_other_ways(case: str) -> None:
    """In context groups; with backward in two parts; adapters of some layers; of matrices of several projections beside
    a base in 8 bits."""
    config = {"sites": ALL["granite_hybrid"], "int8": DENSE["phi3"]}.get(case, ALL["qwen3_5"])
    spec = from_hf_config(config)
    lora, made = Lora(2, 3.0, all_modules(spec), dropout=0.2), plan([pipe(2, 2, *cut(spec.num_layers, [2, 1]))])
    if case == "context":
        groups = [{"ranks": [0, 1], "tokens": [7, 3], "heads": [2, 1]}]
        made = plan([pipe(2, 2, stage([0, 1], [0, spec.num_layers], context=groups))])
    elif case == "zero-bubble":
        made |= {"schedule": case}
    elif case == "sites":
        sites = Sites((1,), ("in_proj", "input_linear"), 3, 2.0), Sites((2,), ("v_proj",), 1, 4.0)
        lora = Lora(2, 3.0, (), sites=sites)
    elif case == "int8":
        lora = Lora(2, 3.0, ("qkv_proj", "gate_up_proj", "o_proj"), base_dtype="int8")
    check(config, made, lora, Case(3, 4, config, made))
