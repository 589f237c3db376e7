"""What knows no linear attention refuses it, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.checkpoint.megatron.names import source
from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import fp8_fits
from hetero_megatron.spec import ModelSpec, adapted, logical_tensors
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import Lora
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.small_plans import pipe, plan, stage

SPEC = from_hf_config(HYBRIDS["qwen3_next"])  # three layers of linear attention and one of attention


@pytest.mark.parametrize("spec", [SPEC, from_hf_config(MAMBAS["granite_hybrid"])], ids=["qwen3_next", "granite_hybrid"])
def test_fp8_few_bits_and_checkpoints_of_megatron_are_refused(spec: ModelSpec) -> None:
    made = plan_from_dict(plan([pipe(1, 1, stage([0], [0, spec.num_layers]))], 10), spec)
    with pytest.raises(UserError, match="linear attention.* compute nothing in fp8"):
        fp8_fits(made, spec, Fp8("e4m3", "tensorwise"), "bf16", None)
    for change, field in (({"base_dtype": "int8"}, "base_dtype"), ({"dora": True}, "dora"),
                          ({"residual": "pissa"}, "residual")):  # fmt: skip
        with pytest.raises(UserError, match="linear attention") as caught:
            adapted(spec, replace(Lora(2, 2.0, ("out_proj",)), **change))
        assert caught.value.field == field
    for tensor in logical_tensors(spec):
        if ".linear_attn." in tensor.name:
            with pytest.raises(UserError, match="is not read from Megatron"):
                source(spec, tensor.name, tensor.shape)


@pytest.mark.parametrize(
    "change",
    [{"linear_num_value_heads": 7}, {"layer_types": ["mamba"] * 4}, {"linear_conv_kernel_dim": 0},
     {"full_attention_interval": 0}],
)  # fmt: skip
def test_bad_configurations_are_refused_by_key(change: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(HYBRIDS["qwen3_next"] | change)
    assert caught.value.field in change


@pytest.mark.parametrize("model", HYBRIDS)
def test_products_of_a_layer_are_its_matrices(model: str) -> None:
    spec = from_hf_config(HYBRIDS[model])
    layer = next(i for i, kind in enumerate(spec.layers) if kind.linear)
    matrices = [t for t in logical_tensors(spec) if t.layer == layer and "linear_attn" in t.name and "proj" in t.name]
    assert spec.delta is not None and spec.delta.elements(spec.hidden_size) == sum(t.size for t in matrices)
