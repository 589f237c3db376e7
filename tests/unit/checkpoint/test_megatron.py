"""Megatron's checkpoints become models that compute what the Hugging Face model did from which they were made."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_megatron.cli.main import main
from tests.support.hf_reference import make_hf
from tests.support.megatron_checkpoint import megatron_modules, save_legacy, save_torch_dist

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "gpt2": GPT2,
}
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "legacy": (save_legacy, {}),
    "legacy_tp2_pp2": (save_legacy, {"tp": 2, "pp": 2}),
    "legacy_interleaved": (save_legacy, {"tp": 2, "pp": 2, "chunks": 2}),
    "legacy_old_names": (save_legacy, {"tp": 2, "pp": 2, "old_names": True}),
    "torch_dist": (save_torch_dist, {}),
    "torch_dist_tp2_pp2": (save_torch_dist, {"tp": 2, "pp": 2}),
    "torch_dist_by_layer": (save_torch_dist, {"tp": 2, "pp": 1, "stacked": False}),
}
EXPERTS = LLAMA | {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "n_routed_experts": 8, "n_shared_experts": 1, "kv_lora_rank": 12,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 7, "routed_scaling_factor": 1.5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 0.9,
}  # fmt: skip
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen3_moe": EXPERTS | {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True},
    "glm4_moe": LLAMA | {"model_type": "glm4_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                         "num_nextn_predict_layers": 0, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 2,
                         "topk_group": 1,
                         "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 1.0},
    "deepseek_v3": DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
                               "q_lora_rank": 10, "rope_scaling": YARN, "num_nextn_predict_layers": 0},
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None, "rope_scaling": None},
}  # fmt: skip
FORMS_OF_EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "legacy": (save_legacy, {"tp": 2}),
    "legacy_tp2_pp2_ep2_grouped": (save_legacy, {"tp": 2, "pp": 2, "ep": 2, "experts": "grouped"}),
    "legacy_ep4_transposed": (save_legacy, {"ep": 4, "experts": "transposed"}),
    "legacy_interleaved": (save_legacy, {"tp": 2, "pp": 2, "chunks": 2, "ep": 2}),
    "legacy_tp2_without_transformer_engine": (save_legacy, {"tp": 2, "local": True}),
    "torch_dist_tp2": (save_torch_dist, {"tp": 2}),
    "torch_dist_singly": (save_torch_dist, {"tp": 2, "singly": True}),
}
TOKENS = torch.arange(12).view(1, 12) * 5 % 61


def convert(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["convert", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "form"), [
    pytest.param(name, form, marks=[] if name == "llama" or (i - j) % 3 == 0 else pytest.mark.exhaustive)
    for i, name in enumerate(["llama", "llama_tied", "gpt2"]) for j, form in enumerate(FORMS)
])  # fmt: skip
def test_logits_are_those_of_the_model(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, form, tmp_path, capsys, by_model=True)


@pytest.mark.parametrize(("name", "form"), [
    ("qwen2", "legacy_tp2_pp2"), ("qwen3", "torch_dist_tp2_pp2"), ("gpt2", "legacy_old_names"), ("llama", "torch_dist"),
    ("llama_tied", "legacy_interleaved"),
])  # fmt: skip
def test_the_stored_arguments_say_what_the_model_is(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, form, tmp_path, capsys, by_model=False)


PAIRS = [  # every form and every family once; the rest is slow
    pytest.param(name, form, marks=[] if (i - j) % 4 == 0 else pytest.mark.exhaustive)
    for i, name in enumerate(WITH_EXPERTS) for j, form in enumerate(FORMS_OF_EXPERTS)
]  # fmt: skip


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_mixtures_of_experts(name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(name, form, tmp_path, capsys, by_model=True)


@pytest.mark.parametrize(("name", "form"), [
    ("mixtral", "torch_dist_tp2"), ("qwen3_moe", "legacy_tp2_pp2_ep2_grouped"), ("glm4_moe", "legacy"),
    ("deepseek_v3", "legacy_tp2_without_transformer_engine"), ("deepseek_v2", "torch_dist_tp2"),
])  # fmt: skip
def test_the_stored_arguments_say_what_the_experts_are(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(name, form, tmp_path, capsys, by_model=False)


def check(name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_model: bool) -> None:
    model, spec = make_hf((MODELS | WITH_EXPERTS)[name], seed=5, dtype=torch.float32)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    write, options = (FORMS_OF_EXPERTS if name in WITH_EXPERTS else FORMS)[form]
    if len({kind.mlp for kind in spec.layers}) > 1 and write is save_torch_dist:
        options = options | {"stacked": False}
    source = write(tmp_path / "megatron", model, spec, **options)
    named = ("--model", tmp_path / "hf") if by_model else ()
    done = convert(capsys, source, tmp_path / "native", *named)
    assert done["dtype"] == "fp32" and any("padding" in notice for notice in done["notices"]) == by_model
    convert(capsys, tmp_path / "native", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").exists() == by_model
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert back.config.vocab_size == (61 if by_model else 128)
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(TOKENS).logits
    # fp32: a product with more columns may add up in another order
    torch.testing.assert_close(back(TOKENS).logits[..., :61], want, rtol=0, atol=0 if by_model else 1e-5)


def source(tmp_path: Path) -> Path:
    model, spec = make_hf(LLAMA, seed=5, dtype=torch.float32)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    return save_torch_dist(tmp_path / "dist", model, spec, tp=2)


class Harmful:
    def __init__(self, command: Any) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return self.command


def harmful(tmp_path: Path) -> Harmful:
    return Harmful((open, (str(tmp_path / "executed"), "w")))


def spoil_metadata(step: Path) -> None:
    (step / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": harmful(step.parents[1])}))


def spoil_common(step: Path) -> None:
    torch.save({"args": harmful(step.parents[1])}, step / "common.pt")


def spoil_chunk(step: Path) -> None:
    file = next(step.glob("__*.distcp"))
    file.write_bytes(b"\0" * file.stat().st_size)


def other_backend(step: Path) -> None:
    (step / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def lost_file(step: Path) -> None:
    next(step.glob("__*.distcp")).unlink()


def leave(step: Path) -> None:
    """A chunk outside the directory."""
    content = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../hf/x.1"))


def cut_off(step: Path) -> None:
    (step / ".metadata").write_bytes((step / ".metadata").read_bytes()[:-40])


def lost_tensor(step: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    del metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv.weight"]
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def holes(step: Path) -> None:
    metadata = pickle.loads((step / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv.weight"].chunks.pop()
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def no_arguments(step: Path) -> None:
    (step / "common.pt").unlink()


def tracker(step: Path) -> None:
    (step.parent / "latest_checkpointed_iteration.txt").write_text("9")


BAD: dict[Any, str] = {
    spoil_metadata: "it holds io.open", spoil_common: "it holds io.open", spoil_chunk: "archive is damaged",
    other_backend: "'zarr'", lost_file: "No such file", leave: "outside its directory", cut_off: "damaged",
    lost_tensor: "missing decoder.layers.0.self_attention.linear_qkv.weight", holes: "do not make it up",
    no_arguments: "--model", tracker: "'9'",
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
def test_damaged_and_hostile_sources_are_refused(
    damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, nothing executed, nothing left behind."""
    where = source(tmp_path)
    damage(where / "iter_0000007")
    capsys.readouterr()
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert BAD[damage] in said and said.count("\n") == 1 and "Traceback" not in said, said
    assert not (tmp_path / "out").exists() and not (tmp_path / "executed").exists()


def test_a_legacy_pickle_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run" / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": harmful(tmp_path), "checkpoint_version": 3.0}, folder / "model_optim_rng.pt")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--model", "tiny"]) == 2
    assert "it holds io.open" in capsys.readouterr().err and not (tmp_path / "executed").exists()


def test_what_other_packages_let_torch_load_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-core, imported, allows argparse.Namespace; two answers to one name would be chance."""
    model, spec = make_hf(LLAMA, seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert main(["convert", str(where), str(tmp_path / "out")]) == 0
        assert argparse.Namespace in torch.serialization.get_safe_globals()


@pytest.mark.parametrize(("changes", "says"), [
    ({"num_experts": 8}, "missing decoder.layers.0.mlp.router.weight"),
    ({"multi_latent_attention": True}, "--qk-layernorm"),
    ({"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 8, "q_lora_rank": None},
     "missing decoder.layers.0.self_attention.linear_q_proj.weight"),
    ({"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": -8}, "--kv-lora-rank"),
    ({"multi_latent_attention": True, "qk_layernorm": True, "qk_pos_emb_head_dim": 5}, "pairs of a head's features"),
    ({"multi_latent_attention": True, "qk_layernorm": True, "rotary_scaling_factor": "x"}, "--rotary-scaling-factor"),
    ({"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "mrope"}, "--rope-type"),
    ({"rotary_percent": 0.5}, "--rotary-percent"), ({"apply_layernorm_1p": True}, "--apply-layernorm-1p"),
    ({"mtp_num_layers": 1}, "mtp_num_layers = 1"), ({"ffn_hidden_size": 44}, "does not fit the model"),
    ({"swiglu": False}, "does not fit the model"), ({"num_layers": 5}, "missing decoder.layers.4."),
])  # fmt: skip
def test_arguments_of_other_models_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, spec = make_hf(LLAMA, seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec, tp=2, **changes)
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said and "command line" not in said and not (tmp_path / "out").exists(), said


def test_a_model_that_contradicts_the_arguments_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = source(tmp_path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 9999.0
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(where), str(tmp_path / "out"), "--model", str(tmp_path / "hf")]) == 2
    assert "--rotary-base = 5000.0" in capsys.readouterr().err


def test_ranks_that_disagree_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, spec = make_hf(LLAMA, seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec, tp=2)
    file = where / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    shutil.copytree(where / "iter_0000007" / "mp_rank_01", where / "iter_0000007" / "mp_rank_02")
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    assert "does not fit the model" in capsys.readouterr().err
    shutil.rmtree(file.parent)
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    assert "mp_rank_01_000 is missing" in capsys.readouterr().err


def without_an_expert(model: dict[str, Any]) -> None:
    del model["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"]


def with_a_narrow_expert(model: dict[str, Any]) -> None:
    name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    model[name] = model[name][:-2].clone()


def with_another_router(model: dict[str, Any]) -> None:
    model["decoder.layers.1.mlp.router.weight"] += 1


def with_an_unknown_tensor(model: dict[str, Any]) -> None:
    model["decoder.layers.1.mlp.experts.local_experts.1.linear_fc3.weight"] = torch.zeros(2)


@pytest.mark.parametrize(("damage", "says"), [
    (without_an_expert, "expert 0 of decoder.layers.0.mlp.experts.experts.linear_fc2.weight is missing"),
    (with_a_narrow_expert, "differ in shape"), (with_another_router, "different values of decoder.layers.1.mlp.router"),
    (with_an_unknown_tensor, "different tensors"), (None, "mp_rank_01_000_001 is missing"),
])  # fmt: skip
def test_damaged_experts_are_refused(
    damage: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, spec = make_hf(WITH_EXPERTS["mixtral"], seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec, tp=2, ep=2, pipeline_model_parallel_size=1)
    for t in (0, 1):
        file = where / "iter_0000007" / f"mp_rank_{t:02d}_001" / "model_optim_rng.pt"
        if damage is not None:
            with megatron_modules():
                content = torch.load(file, weights_only=False)
                damage(content["model"])
                torch.save(content, file)
    if damage is None:
        shutil.rmtree(file.parent)
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not (tmp_path / "out").exists(), said


def test_experts_cut_otherwise_than_the_rest_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, spec = make_hf(WITH_EXPERTS["mixtral"], seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec, tp=2, expert_tensor_parallel_size=1)
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    assert "cut for 1 tensor-parallel ranks and the rest for 2" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "says"), [
    ({"kv_lora_rank": 13}, "--kv-lora-rank"), ({"mscale_all_dim": 0.5}, "--rotary-scaling-factor"),
    ({"rotary_scaling_factor": 4.0}, "--rotary-scaling-factor"), ({"qk_layernorm": False}, "--qk-layernorm"),
    ({"norm_epsilon": 1e-5}, "--norm-epsilon"), ({"v_head_dim": 6}, "--v-head-dim"),
    ({"q_lora_rank": None}, "--q-lora-rank"),
    ({"multi_latent_attention": False}, "--kv-channels"),
])  # fmt: skip
def test_latent_attention_that_contradicts_the_model_is_refused(
    changes: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, spec = make_hf(WITH_EXPERTS["deepseek_v3"], seed=5, dtype=torch.float32)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    where = save_legacy(tmp_path / "run", model, spec, **changes)
    capsys.readouterr()
    assert main(["convert", str(where), str(tmp_path / "out"), "--model", str(tmp_path / "hf")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not (tmp_path / "out").exists(), said


def without_a_latent_norm(model: dict[str, Any]) -> None:
    del model["decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight"]


def with_a_short_latent(model: dict[str, Any]) -> None:
    name = "decoder.layers.1.self_attention.linear_kv_down_proj.weight"
    model[name] = model[name][:-1].clone()


def with_another_latent(model: dict[str, Any]) -> None:
    model["decoder.layers.1.self_attention.linear_q_down_proj.weight"] += 1


@pytest.mark.parametrize(("damage", "says"), [
    (without_a_latent_norm, "missing decoder.layers.2.self_attention.linear_kv_up_proj.layer_norm_weight"),
    (with_a_short_latent, "linear_kv_down_proj.weight is [31, 32], not [16, 32]"),
    (with_another_latent, "different values of decoder.layers.1.self_attention.linear_q_down_proj.weight"),
])  # fmt: skip
def test_damaged_latents_are_refused(
    damage: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, spec = make_hf(WITH_EXPERTS["deepseek_v3"], seed=5, dtype=torch.float32)
    where = save_legacy(tmp_path / "run", model, spec, tp=1 if damage is without_a_latent_norm else 2)
    file = where / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    with megatron_modules():
        content = torch.load(file, weights_only=False)
        damage(content["model"])
        torch.save(content, file)
    assert main(["convert", str(where), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1 and not (tmp_path / "out").exists(), said
