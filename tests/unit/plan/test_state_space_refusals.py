"""Mamba-2: what is refused by name, and what its sizes mean for shares of a TP group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import NemotronHConfig

from hetero_megatron.checkpoint.megatron.names import source
from hetero_megatron.errors import UserError
from hetero_megatron.spec import LayerKind, logical_tensors, shares
from hetero_megatron.spec.flops import delta_flops
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import export_config
from hetero_megatron.spec.state_space import StateSpace
from tests.support.moe_models import HYBRIDS, MAMBAS, NEMOTRON_H

SPEC = from_hf_config(MAMBAS["granite_hybrid"])  # three groups of two heads


def test_another_mixer_than_the_layers_have_is_refused() -> None:
    with pytest.raises(UserError, match="another mixer than its layers have"):
        replace(SPEC, delta=from_hf_config(HYBRIDS["qwen3_next"]).delta)


@pytest.mark.parametrize(
    "change",
    [{"mamba_n_groups": 4}, {"mamba_d_head": 9}, {"mamba_n_heads": 5}, {"layer_types": ["recurrent"] * 3},
     {"time_step_limit": [2.0, 1.0]}, {"time_step_limit": [0.0, "Infinity"]}, {"num_local_experts": 5,
     "num_experts_per_tok": 6}, {"normalization_function": "layernorm"}],
)  # fmt: skip
def test_bad_configurations_are_refused_by_key(change: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(MAMBAS["granite_hybrid"] | change)
    assert caught.value.field in change


@pytest.mark.parametrize(
    ("change", "key"),
    [({"layers_block_type": ["recurrent"]}, "layers_block_type"), ({"layers_block_type": []}, "layers_block_type"),
     ({"layers_block_type": None}, "hybrid_override_pattern"),
     ({"layers_block_type": None, "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern"),
     ({"layers_block_type": None, "hybrid_override_pattern": "Me*"}, "hybrid_override_pattern"),
     ({"num_hidden_layers": 4}, "num_hidden_layers"), ({"n_groups": 4}, "n_groups"),
     ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"), ({"tie_word_embeddings": True}, "tie_word_embeddings")],
)  # fmt: skip
def test_bad_configurations_of_nemotron_h_are_refused_by_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(NEMOTRON_H | change)
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("change", "key"),
    [({"moe_latent_size": 8}, "moe_latent_size"), ({"mlp_hidden_act": "gelu"}, "mlp_hidden_act"),
     ({"n_routed_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"), ({"n_routed_experts": 0},
     "n_routed_experts"), ({"num_local_experts": 4}, "num_local_experts"), ({"n_group": 2}, "n_group"),
     ({"moe_intermediate_size": "12"}, "moe_intermediate_size"), ({"norm_topk_prob": 1}, "norm_topk_prob"),
     ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size")],
)  # fmt: skip
def test_bad_experts_of_nemotron_h_are_refused_by_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(MAMBAS["nemotron_h_experts"] | change)
    assert caught.value.field == key


def test_layers_of_one_block_are_not_read_from_megatron() -> None:
    spec = from_hf_config(MAMBAS["nemotron_h_experts_groups"])
    for tensor in (tensor for tensor in logical_tensors(spec) if isinstance(tensor.layer, int)):
        with pytest.raises(UserError, match="is not read from Megatron"):
            source(spec, tensor.name, tensor.shape)


def test_absent_keys_of_experts_mean_what_they_mean_in_transformers() -> None:
    spec, theirs = from_hf_config(NEMOTRON_H | {"layers_block_type": ["moe"]}), NemotronHConfig()
    assert spec.moe is not None and not spec.gated
    assert (spec.moe.num_experts, spec.moe.top_k, spec.moe.ffn_hidden_size, spec.moe.shared_ffn) == (
        theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size,
        theirs.moe_shared_expert_intermediate_size,
    )  # fmt: skip
    assert (spec.moe.normalize, spec.moe.scale) == (theirs.norm_topk_prob, theirs.routed_scaling_factor)
    assert (spec.moe.groups, spec.moe.top_groups) == (theirs.n_group, theirs.topk_group)


def test_letters_and_names_say_the_same_layers() -> None:
    named = from_hf_config(NEMOTRON_H)
    config = NEMOTRON_H | {"layers_block_type": None, "hybrid_override_pattern": "M-*", "num_hidden_layers": 3}
    assert from_hf_config(config) == named == from_hf_config(NEMOTRON_H | {"hybrid_override_pattern": "***"})
    assert export_config(named, None)["hybrid_override_pattern"] == "M-*"
    with pytest.raises(UserError, match="neither mixer nor MLP"):
        LayerKind(mixer="none", mlp="none")
    with pytest.raises(UserError, match="have one norm, before it"):
        replace(named, parallel_block="one_norm")


def test_limits_of_step_sizes_come_back() -> None:
    for limits, said in (([0.0, {"__float__": "Infinity"}], (0.0, None)), ([0.01, 2.0], (0.01, 2.0))):
        spec = from_hf_config(MAMBAS["granite_hybrid"] | {"time_step_limit": limits})
        assert isinstance(spec.delta, StateSpace) and spec.delta.step_limits == said
        assert from_hf_config(export_config(spec, None), name=spec.name) == spec


def test_ranks_have_whole_groups_or_copies_of_them() -> None:
    def cut(*weights: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(share.key_heads, share.value_heads) for share in shares(SPEC, weights)]

    assert cut(2, 1) == [((0, 2), (0, 4)), ((2, 3), (4, 6))]
    assert cut(1, 1, 1, 1) == [((0, 1), (0, 2)), ((1, 2), (2, 3)), ((1, 3), (3, 5)), ((2, 3), (5, 6))]
    assert delta_flops(SPEC) == 2 / 3 * 4 * 6 * 8 * 5
