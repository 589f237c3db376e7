"""Model configurations, logical tensors, shares and cost formulas."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.spec import (
    LogicalTensor,
    ModelSpec,
    Share,
    load_model,
    logical_tensors,
    preset_names,
    shares,
    stage_tensors,
    tensor_box,
    whole_share,
)
from hetero_megatron.spec.activation_bytes import head_activation_bytes, layer_activation_bytes
from hetero_megatron.spec.flops import (
    layer_parameters,
    parameter_count,
    projection_elements,
    sequence_flops,
    visible_pairs,
)
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.spec.hf_export import to_hf_config
from tests.support.families import DENSE
from tests.support.moe_models import MOE_FAMILIES
from tests.support.selection import each

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 64,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


PUBLISHED = {  # parameters, in thousands, from the models' own pages and checkpoints
    "gpt2": 124_439, "llama2-7b": 6_738_415, "llama2-13b": 13_015_864, "llama2-70b": 68_976_648,
    "llama-30b": 32_528_943,
    "llama3-8b": 8_030_261, "llama3-70b": 70_553_706, "llama3.1-8b": 8_030_261, "mistral-7b": 7_241_732,
    "qwen2.5-7b": 7_615_616, "qwen3-8b": 8_190_735,
}  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_published_sizes_and_survive_hugging_face(name: str) -> None:
    spec = load_model(name)
    if name in PUBLISHED:
        assert parameter_count(spec) // 1000 == PUBLISHED[name]
    elif size := re.search(r"-([0-9.]+)([mbt])$", name):  # of papers, which round
        count = float(size[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[2]]
        assert parameter_count(spec) == pytest.approx(count, rel=0.045)
    else:
        assert name == "tiny" and 1e6 < parameter_count(spec) < 3e6 and spec.vocab_size >= 257
    assert from_hf_config(json.loads(json.dumps(to_hf_config(spec))), name=spec.name) == spec


@pytest.mark.parametrize("name", ["gpt2", "llama3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    spec = load_model(name)
    theirs = transformers.AutoConfig.for_model(**to_hf_config(spec))
    assert from_hf_config(json.loads(theirs.to_json_string(use_diff=True)), name=name) == spec


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = {"model_type": family} | (
        without(GPT2, "model_type", "n_positions")
        if family == "gpt2"
        else {
            "num_hidden_layers": 2,
            "hidden_size": 256,
            "num_attention_heads": 32,
            "intermediate_size": 8,
            "vocab_size": 9,
        }
    )
    theirs = transformers.AutoConfig.for_model(**given)
    assert from_hf_config(given) == from_hf_config(json.loads(theirs.to_json_string(use_diff=False)))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, "model_type"),
    ({}, "model_type"),
    (LLAMA | {"model_type": ["llama"]}, "model_type"),
    (LLAMA | {"hidden_act": "relu"}, "hidden_act"),
    (LLAMA | {"attention_dropout": 1.0}, "attention_dropout"),
    (LLAMA | {"attention_dropout": float("nan")}, "attention_dropout"),
    (LLAMA | {"attention_dropout": -0.1}, "attention_dropout"),
    (LLAMA | {"attention_dropout": "0.1"}, "attention_dropout"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "rope_scaling.factor"),
    (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type"),
    (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
    (
        LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
        "rope_scaling.beta_fast",
    ),
    (LLAMA | {"rope_scaling": 8}, "rope_scaling"),
    (LLAMA | {"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta"),
    (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters.full_attention"),
    (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
    (LLAMA | {"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
    (LLAMA | {"vocab_size": 0}, "vocab_size"),
    (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers"),
    (without(LLAMA, "hidden_size"), "hidden_size"),
    (LLAMA | {"rms_norm_eps": 0}, "rms_norm_eps"),
    (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    (LLAMA | {"head_dim": 7}, "head_dim"),
    (LLAMA | {"model_type": "mistral", "attention_bias": True}, "attention_bias"),
    (LLAMA | {"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
    (LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    (LLAMA | {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    (GPT2 | {"resid_pdrop": True}, "resid_pdrop"),
    (GPT2 | {"activation_function": "swish"}, "activation_function"),
    (GPT2 | {"n_head": 5}, "n_head"),
    (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights"),
]


@pytest.mark.parametrize("config, field", REFUSED, ids=[f"{i}-{f}" for i, (_, f) in enumerate(REFUSED)])
def test_what_would_change_numbers_is_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        from_hf_config(config, where="some/config.json")
    assert field in str(caught.value) and caught.value.accepted
    if field != "head_dim":  # found by ModelSpec itself, which knows no file
        assert "some/config.json" in str(caught.value)


def test_sliding_windows_are_read_as_transformers_reads_them() -> None:
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8}
    assert from_hf_config(qwen).windows == (None,)
    assert from_hf_config(qwen | {"use_sliding_window": True}).windows == (None,)  # first 28 layers are full
    assert from_hf_config(qwen | {"use_sliding_window": True, "max_window_layers": 0}).windows == (8,)
    assert from_hf_config(LLAMA | {"model_type": "mistral"}).windows == (4096,)
    assert from_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).windows == (None,)


def test_dropout_rates_are_read_as_transformers_does_and_are_no_part_of_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    quiet = GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert from_hf_config(quiet).dropouts == ()
    for config in (GPT2, GPT2 | {"resid_pdrop": 0.0}, LLAMA | {"attention_dropout": 0.2}, LLAMA):
        spec, theirs = from_hf_config(config), transformers.AutoConfig.for_model(**config)
        for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
            assert dict(spec.dropouts).get(key, 0.0) == (getattr(theirs, key, 0.0) or 0.0)
        assert spec == from_hf_config(config | dict.fromkeys(dict(spec.dropouts), 0.0))
    assert hash(from_hf_config(GPT2)) == hash(from_hf_config(quiet))


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"norm": "layer"}, "norm"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"activation": "gelu"}, "activation"),
        ({"qk_norm": "head"}, "qk_norm"),
    ],
)
def test_models_that_no_family_has_are_not_exported(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        to_hf_config(replace(load_model("tiny"), **changes))


def test_load_model_reads_directories_and_files_and_names_bad_ones(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(str(folder)) == load_model(str(folder / "config.json")) == from_hf_config(LLAMA, name="my-model")
    with pytest.raises(UserError, match="did you mean llama2-7b"):
        load_model("llama2-7")
    for text in ("{", "[1]", '"llama"'):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match="config.json"):
            load_model(str(folder))


def test_importing_spec_is_quick_and_without_torch() -> None:
    code = "import sys, hetero_megatron.spec, hetero_megatron.spec.flops; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def random_spec(rng: random.Random) -> ModelSpec:
    kv = rng.choice([1, 2, 3, 4, 8])
    return ModelSpec(
        name="random",
        hf_model_type="llama",
        num_layers=rng.randint(1, 3),
        hidden_size=rng.choice([8, 24]),
        ffn_hidden_size=rng.randint(24, 60),
        num_heads=kv * rng.choice([1, 2, 3, 4]),
        num_kv_heads=kv,
        head_dim=rng.choice([2, 4]),
        vocab_size=rng.randint(1, 70),
        max_position_embeddings=16,
        norm=rng.choice(["rms", "layer"]),
        activation=rng.choice(["swiglu", "gelu"]),
        qkv_bias=rng.random() < 0.5,
        out_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        qk_norm=rng.choice([None, None, "head", "projection"]),
        tied=rng.random() < 0.5,
        position=rng.choice(["rope", "learned"]),
    )


def covered(tensor: LogicalTensor, split: tuple[Share, ...]) -> np.ndarray:
    """How many ranks hold each element."""
    count = np.zeros(tensor.shape, dtype=int)
    for share in split:
        count[tensor_box(tensor, share).slices()] += 1
    return count


@each("seed", range(60))
def test_shares_tile_every_tensor(seed: int) -> None:
    """Cut axes are covered once; key-value heads as often as ranks use them; all else by every rank."""
    rng = random.Random(seed)
    spec = random_spec(rng)
    weights = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
    split = shares(spec, weights)
    group = spec.queries_per_kv
    users = [sum(a <= h < b for a, b in (s.kv_heads for s in split)) for h in range(spec.num_kv_heads)]
    for h, count in enumerate(users):
        using = sum(any(q // group == h for q in range(*s.q_heads)) for s in split)
        assert count == using
    if spec.num_kv_heads >= len(weights):
        assert set(users) == {1}
    for tensor in logical_tensors(spec):
        roles = {a.role for a in tensor.axes}
        count = covered(tensor, split)
        if "kv_heads" in roles:
            assert (count.reshape(spec.num_kv_heads, -1) == np.array(users)[:, None]).all()
        else:
            assert (count == (1 if roles & {"q_heads", "ffn", "vocab"} else len(weights))).all(), tensor.name
        assert tensor_box(tensor, whole_share(spec)).size == tensor.size


@each("seed", range(40))
def test_shares_of_some_heads_hold_exactly_the_key_value_heads_they_need(seed: int) -> None:
    rng = random.Random(seed)
    spec = random_spec(rng)
    first = rng.randint(0, spec.num_heads)
    last = rng.randint(first, spec.num_heads)
    split = shares(spec, [rng.randint(1, 3) for _ in range(rng.randint(1, 4))], heads=(first, last))
    heads = [h for s in split for h in range(*s.q_heads)]
    assert heads == list(range(first, last))
    for s in split:
        needed = sorted({h // spec.queries_per_kv for h in range(*s.q_heads)})
        assert list(range(*s.kv_heads)) == needed


def test_the_cutting_rule_by_hand() -> None:
    spec = load_model("llama2-70b")  # 64 query heads on 8 key-value heads
    assert [s.kv_heads for s in shares(spec, (1, 2, 1))] == [(0, 2), (2, 6), (6, 8)]
    assert [s.q_heads for s in shares(spec, (1, 2, 1))] == [(0, 16), (16, 48), (48, 64)]
    sixteen = shares(spec, (1,) * 16)
    assert [s.kv_heads for s in sixteen[:4]] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert shares(spec, (1, 100))[0].q_heads == (0, 0)
    with pytest.raises(UserError, match="feed-forward"):
        shares(spec, (0, 1))


def test_stages_partition_the_tensors_except_a_tied_matrix() -> None:
    for tied in (False, True):
        spec = replace(load_model("tiny"), tied=tied)
        held = [t.name for t in stage_tensors(spec, [0, 1], True, False)]
        held += [t.name for t in stage_tensors(spec, range(2, 6), False, False)]
        held += [t.name for t in stage_tensors(spec, [], False, True)]
        assert set(held) == {t.name for t in logical_tensors(spec)}
        assert len(held) - len(set(held)) == (1 if tied else 0)


def test_flops_against_counting() -> None:
    for n, window in [(1, None), (7, None), (7, 3), (7, 7), (7, 20), (5, 1)]:
        counted = sum(1 for i in range(n) for j in range(i + 1) if i - j < (window or n))
        assert visible_pairs(n, window) == counted
        for chunk in (1, 3, 7, 9):
            counted = sum(
                1 for i in range(n) for j in range(i + 1) if i - j < (window or n) and i // chunk == j // chunk
            )
            assert visible_pairs(n, window, chunk) == counted
    spec = load_model("llama2-7b")
    per_token = sequence_flops(spec, 4096) / 4096
    matrices = parameter_count(spec) - spec.vocab_size * spec.hidden_size - (2 * 32 + 1) * 4096
    attention = 12 * spec.num_layers * spec.hidden_size * 4097 / 2
    assert per_token == pytest.approx(6 * matrices + attention, rel=1e-12)
    for config in (DENSE | MOE_FAMILIES).values():
        family = from_hf_config(config)
        matrices = [t for t in logical_tensors(family) if t.layer == 0 and ".self_attn." in t.name]
        assert projection_elements(family) == sum(t.size for t in matrices if len(t.shape) == 2)
    assert layer_parameters(spec) == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096


def test_activation_bytes_match_what_autograd_saves() -> None:
    """Every tensor that a layer saves for backward, counted once, without parameters and rotary tables."""
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from hetero_megatron.model import GPTStage

    tiny = load_model("tiny")
    changed = [tiny, *(replace(tiny, **c) for c in ({"qk_norm": "head"}, {"activation": "gelu", "norm": "layer"}))]
    sizes = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "kv_lora_rank": 64, "intermediate_size": 352,
             "first_k_dense_replace": 3}  # fmt: skip
    latent = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8} | sizes
    for ranks in ({"q_lora_rank": 48, "v_head_dim": 16}, {"q_lora_rank": None, "v_head_dim": 24}):
        changed.append(from_hf_config(MOE_FAMILIES["deepseek_v2"] | latent | ranks))
    wide = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 352}
    for name in ("gpt_neox", "cohere_qk_norm", "phi", "stablelm_parallel", "glm"):
        changed.append(from_hf_config(DENSE[name] | wide | {"head_dim": 16}))
    for spec in changed:
        stage = GPTStage(spec, whole_share(spec), [0], False, False)
        for p in stage.parameters():
            torch.nn.init.constant_(p, 0.01)
        skip = {p.data_ptr() for p in stage.parameters()}
        saved: dict[int, int] = {}

        def pack(t: Any, saved: dict[int, int] = saved, skip: set[int] = skip) -> Any:
            storage = t.untyped_storage()
            # Norms keep a number or two per row, rotary tables are shared by all layers: neither counts.
            if t.data_ptr() not in skip and t.numel() * t.element_size() > 2 * 64 * 16 * 4:
                saved[storage.data_ptr()] = storage.nbytes()
            return t

        x = torch.randn(2, 64, spec.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            positions = torch.arange(64).expand(2, 64)
            stage(x, SimpleNamespace(positions=positions, documents=None, loss_mask=None, draws=None))
        want = layer_activation_bytes(spec, 128, itemsize=4) - 128 * 4 * spec.num_heads  # lse is below the threshold
        assert sum(saved.values()) == pytest.approx(want, rel=0.02), spec


def test_activation_bytes_shrink_with_recompute_and_tensor_parallelism() -> None:
    spec = load_model("llama3-8b")
    none, selective, full = (layer_activation_bytes(spec, 4096, kind) for kind in ("none", "selective", "full"))
    assert none > selective > full == 4096 * 4096 * 2
    assert none / 2 < layer_activation_bytes(spec, 4096, tp=2) < none
    assert head_activation_bytes(spec, 4096, tp=2) < head_activation_bytes(spec, 4096)
