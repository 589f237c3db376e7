"""LoRA on linear attention and on several projections in one matrix: values and gradients are peft's, fp64."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.spec import Lora
from hetero_megatron.spec.adapter_modules import all_modules
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import MLP_TARGETS
from tests.distributed.training.test_lora import check
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.parity import Case
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

ALL: dict[str, dict[str, Any]] = HYBRIDS | MAMBAS


def cut(layers: int, split: list[int], **more: Any) -> list[dict[str, Any]]:
    """Uneven tensor parallelism before a stage of the last layer."""
    ranks = list(range(len(split)))
    return [stage(ranks, [0, layers - 1], tp=len(split), tp_split=split, **more),
            stage([len(split)], [layers - 1, layers])]  # fmt: skip


@pytest.mark.parametrize("family", quick([*ALL], ["qwen3_5", "granite_hybrid"], ["qwen3_next", "kimi_linear"]))
def test_hybrids(family: str) -> None:
    """Every matrix that may have an adapter, under TP of 2 and 3 and two stages, and recompute."""
    config, number = ALL[family], [*ALL].index(family)
    spec = from_hf_config(config)
    targets = [name for name in all_modules(spec) if spec.moe is None or name not in MLP_TARGETS]
    split = [2, 1] if number % 2 else [2, 1, 1]
    stages = cut(spec.num_layers, split, recompute=["none", "full", "selective"][number % 3])
    made = plan([pipe(2, 2, *stages)])
    lora = Lora(3, 5.0, tuple(targets), rslora=number % 2 == 1, dropout=0.3 * (number % 4 == 2))
    check(config, made, lora, Case(number, 4, config, made, optimizer="sgd" if number % 2 else "adamw"))
