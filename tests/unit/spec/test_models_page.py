"""docs/models.md says what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from hetero_megatron.checkpoint.adapter import adapter_table
from hetero_megatron.cli.models import adapters, markdown
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, adapted
from hetero_megatron.spec.adapter_modules import all_modules, default_targets
from hetero_megatron.spec.adapter_places import modules
from hetero_megatron.spec.families import FAMILIES
from hetero_megatron.spec.families.refused import REFUSED
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.lora import FUSED_TARGETS, LINEAR_TARGETS, MLP_TARGETS, all_linear
from tests.support.families import BASE, DENSE
from tests.support.moe_models import HYBRIDS, MAMBAS, MOE_FAMILIES

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def sample(family: str) -> dict[str, Any]:
    if family == "gpt2":
        return {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 64}
    known = (config for config in (DENSE | MOE_FAMILIES | HYBRIDS | MAMBAS).values() if config["model_type"] == family)
    return next(known, BASE | {"model_type": family})


def test_the_page_is_current() -> None:
    written = (Path(__file__).parents[3] / "docs/models.md").read_text()
    assert written == markdown(), "run: python -m hetero_megatron.cli.models --markdown > docs/models.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_experts_are_as_the_page_says(family: str) -> None:
    spec, said = from_hf_config(sample(family)), adapters(FAMILIES[family])
    assert (spec.moe is not None, spec.mla is not None) == (FAMILIES[family].mixture, FAMILIES[family].latent)

    def works(*targets: str) -> bool:
        try:
            adapted(spec, Lora(2, 2.0, targets))
        except UserError:
            return False
        return True

    if spec.hybrid:
        assert works(*default_targets(spec))
        outside = tuple(name for name in default_targets(spec) if spec.moe is None or name not in MLP_TARGETS)
        assert {*FUSED_TARGETS, *LINEAR_TARGETS} & set(outside)
        table = adapter_table(adapted(spec, Lora(2, 2.0, outside)))
        assert {source.name for source in table.values()} == {
            f"base_model.model.{name}.lora_{part}.weight" for name in modules(spec).values() for part in "AB"
        }
        return
    latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    outside = ATTENTION if spec.mla is None else latent
    assert works(*outside) and works(*all_linear(spec.gated)) == (said.startswith("all") or spec.mla is None)
    assert said.startswith("attention, experts") == (spec.moe is not None)
    if said.startswith("attention") and said.endswith("merged"):
        with pytest.raises(UserError, match="peft takes"):
            adapter_table(adapted(spec, Lora(2, 2.0, (*outside, *MLP_TARGETS))))
        assert len(adapter_table(adapted(spec, Lora(2, 2.0, outside)))) == 8 * spec.num_layers
    elif spec.moe is not None:
        model = adapted(spec, Lora(2, 2.0, (*outside, *MLP_TARGETS)))
        experts = 6 * sum(kind.mlp == "moe" for kind in spec.layers)
        assert len(adapter_table(model)) == experts + 2 * spec.num_layers * sum(works(name) for name in outside)
    if said.startswith("all"):
        model = adapted(spec, Lora(2, 2.0, all_linear(spec.gated)))
        if said.endswith("merged"):
            with pytest.raises(UserError, match="no matrix of its own"):
                adapter_table(model)
        elif said.endswith("fused"):
            with pytest.raises(UserError, match="no matrix of its own"):
                adapter_table(model)
            whole = adapter_table(adapted(spec, Lora(2, 2.0, all_modules(spec))))
            assert {source.name for source in whole.values()} == {
                f"base_model.model.{name}.lora_{part}.weight" for name in modules(spec).values() for part in "AB"
            }
        else:
            assert len(adapter_table(model)) == 2 * len(all_linear(spec.gated)) * spec.num_layers


def test_a_refusal_has_the_reason_of_the_page() -> None:
    for family, (lacks, near) in REFUSED.items():
        assert family in CONFIG_MAPPING and family not in FAMILIES and near in FAMILIES
        with pytest.raises(UserError) as caught:
            from_hf_config({"model_type": family}, where="config.json")
        assert caught.value.field == "model_type" and lacks in str(caught.value) and f"is {near}" in str(caught.value)
    with pytest.raises(UserError, match="this model family is not supported"):
        from_hf_config({"model_type": "somebody_elses"})
