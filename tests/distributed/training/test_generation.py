"""Generation is transformers': greedy, token by token, for several families under several plans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_megatron.cli.main import main
from tests.support.chat import TEMPLATES, chat_tokenizer
from tests.support.ports import free_port
from tests.support.selection import quick

VOCAB, LENGTH, NEW = 330, 160, 32
SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": LENGTH}  # fmt: skip
LATENT = {**SMALL, "num_key_value_heads": 6, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 12},
    "gemma2": {"model_type": "gemma2", **SMALL, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24, "norm_topk_prob": True},
    "gpt_oss": {"model_type": "gpt_oss", **SMALL, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2,
                "sliding_window": 9, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT, "topk_method": "greedy"},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
                    "q_lora_rank": 20},
    "llama4": {"model_type": "llama4_text", **SMALL, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2,
               "intermediate_size_mlp": 60, "attention_chunk_size": 9, "no_rope_layers": [1, 0, 1], "floor_scale": 7,
               "interleave_moe_layer_step": 2},
    "ministral3": {"model_type": "ministral3", **SMALL, "head_dim": 8, "sliding_window": 11, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.2}},
    "exaone4": {"model_type": "exaone4", **SMALL, "sliding_window": 9, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"model_type": "phi3", **SMALL, "original_max_position_embeddings": 24, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]},
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LENGTH},
}
PLAIN = {key: size for key, size in SMALL.items() if key not in ("num_key_value_heads", "intermediate_size")}
PARALLEL_BLOCKS: dict[str, dict[str, Any]] = {
    "gptj": {"model_type": "gptj", "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": LENGTH,
             "rotary_dim": 4},
    "phi": {"model_type": "phi", **SMALL, "qk_layernorm": True},
    "falcon": {"model_type": "falcon", **PLAIN},
    "cohere2": {"model_type": "cohere2", **SMALL, "sliding_window": 9, "sliding_window_pattern": 3},
}
DELTA = {
    **SMALL, "head_dim": 16, "full_attention_interval": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
HYBRIDS = {
    "qwen3_next": {
        "model_type": "qwen3_next", **DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "kimi_linear": {
        "model_type": "kimi_linear", **{key: size for key, size in LATENT.items() if key != "n_routed_experts"},
        "num_local_experts": 6, "linear_num_heads": 3, "linear_head_dim": 8, "pad_token_id": 0, "bos_token_id": None,
        "eos_token_id": None, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **SMALL, "num_local_experts": 0, "shared_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 3,
        "mamba_d_state": 10, "mamba_expand": 1, "residual_multiplier": 0.5, "time_step_limit": [0.0, 1e9],
    },
    "bamba": {
        "model_type": "bamba", **SMALL, "attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_n_groups": 2,
        "mamba_d_state": 6,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", **SMALL, "hybrid_override_pattern": "M-*", "mamba_num_heads": 6, "n_groups": 2,
        "mamba_head_dim": 8, "ssm_state_size": 6, "time_step_min": 1e-9,
    },
}
HYBRIDS["nemotron_3"] = HYBRIDS["nemotron_h"] | {
    "hybrid_override_pattern": "ME*", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}
FAMILIES |= PARALLEL_BLOCKS | HYBRIDS
UNEVEN = """
version: 1
seq_length: 16
global_batch_size: 2
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 2
    stages:
      - {ranks: [1, 0], layers: [0, 2], tp: 2, tp_split: [2, 1]}
      - {ranks: 2, layers: [2, 3]}
"""
INTERLEAVED = """
version: 1
seq_length: 16
global_batch_size: 3
schedule: interleaved
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 2,
     stages: [{ranks: [0, 1], layers: [[0, 1], [2, 3]], tp: 2}, {ranks: 2, layers: [[1, 2], [3, 3]]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 3, layers: [[0, 3], [3, 3]]}]}
"""
PLANS = {"one": (1, None), "uneven": (3, UNEVEN), "interleaved": (4, INTERLEAVED)}
PROMPTS = ("the quick brown", "hello", "fox 17 jumps over the lazy dog and says hello to the other fox", "q")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of each family's model, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(name: str) -> Path:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[name]), dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() > 1:
                    param.normal_(0, 0.15)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder / name)
        chat_tokenizer(folder / name, TEMPLATES["chatml"])
        return folder / name

    return made


def generate(words: list[str], ranks: int) -> tuple[str, str]:
    """(stdout of rank 0, stderr) of the command on so many ranks."""
    from tests.support.programs import ENVIRONMENT, Program

    port = str(free_port())
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
    programs = [
        Program(words, {**ENVIRONMENT, **job, **({"RANK": str(r), "LOCAL_RANK": str(r)} if job else {})}, "generate")
        for r in range(ranks)
    ]
    said = [p.communicate(240) for p in programs]
    assert [p.returncode for p in programs] == [0] * ranks, said
    return said[0]


@cache
def expected(path: Path, prompts: tuple[str, ...], model: Any = None) -> list[list[int]]:
    """By transformers' generate, with the model in ``path`` or another one with its tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path) if model is None else model
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
        out.append(made[0, ids.shape[1] :].tolist())
    return out


# How ranks share the work is not a family's: all plans with one of them.
GREEDY = [("llama", "one"), ("llama", "interleaved"), *((name, "uneven") for name in FAMILIES)]
IN_MAKE_TEST = [("llama", "one")]


@pytest.mark.parametrize("case", quick(GREEDY, IN_MAKE_TEST, GREEDY[1::5]), ids=lambda case: "-".join(case))
def test_greedy_is_transformers(case: tuple[str, str], models: Callable[[str], Path], tmp_path: Path) -> None:
    name, plan = case
    assert answers(["--load-hf", str(models(name))], PROMPTS, plan, tmp_path) == expected(models(name), PROMPTS)


@pytest.mark.parametrize("plan", quick(PLANS, ["one"]))
def test_a_native_checkpoint_gives_the_same(plan: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    """With the tokenizer that is in it."""
    assert main(["convert", str(models("llama")), str(tmp_path / "native")]) == 0
    assert answers(["--load", str(tmp_path / "native")], PROMPTS, plan, tmp_path) == expected(models("llama"), PROMPTS)


@pytest.mark.parametrize("plan", quick(PLANS, ["one"]))
def test_adapters_are_those_of_peft(plan: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    check_adapters("llama", ["q_proj", "v_proj", "down_proj"], plan, models, tmp_path)


@pytest.mark.parametrize("family", quick(["qwen3_5", "granitemoehybrid", "phi3"], [], []))
def test_adapters_of_fused_projections(family: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    check_adapters(family, "all-linear", "uneven", models, tmp_path)


@pytest.mark.slow
def test_dora_of_experts(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Two ranks have columns of every expert."""
    check_adapters("qwen3_moe", ["q_proj", "up_proj", "down_proj"], "uneven", models, tmp_path, dora=True)


def check_adapters(
    family: str, targets: list[str] | str, plan: str, models: Callable[[str], Path], tmp_path: Path, dora: bool = False
) -> None:
    from peft import LoraConfig, get_peft_model

    from hetero_megatron.spec.hf_config import from_hf_config
    from tests.support.peft_reference import keep_single_experts

    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(models(family))
    if dora:
        keep_single_experts(base, from_hf_config(FAMILIES[family]))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", use_dora=dora)
    model = get_peft_model(base, config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, 0, 0.1)
        if "magnitude" in name:
            param.data *= torch.empty_like(param).uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "adapter")
    wanted = expected(models(family), PROMPTS, model)
    assert wanted != expected(models(family), PROMPTS)
    words = ["--load-hf", str(models(family)), "--load-adapter", str(tmp_path / "adapter")]
    assert answers(words, PROMPTS, plan, tmp_path) == wanted


def test_chat_prompts_are_rendered_by_the_template(models: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, path = AutoTokenizer.from_pretrained(models("llama")), models("llama")
    system = {"role": "system", "content": "say hello"}
    chats = [[system, {"role": "user", "content": text}] for text in PROMPTS[:2]]
    texts = tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats)
    words = ["--load-hf", str(path), "--chat", "--system", system["content"]]
    assert answers(words, PROMPTS[:2], "one", tmp_path) == expected(path, texts)


def answers(
    words: list[str], prompts: Sequence[str], plan: str, tmp_path: Path, ends: Sequence[str] = ("--ignore-eos",)
) -> list[list[int]]:
    """Greedy, under one of ``PLANS``."""
    ranks, text = PLANS[plan]
    words = [*words, "--json", "--max-new-tokens", str(NEW), *ends, "--batch-size", "3"]
    words += [word for prompt in prompts for word in ("--prompt", prompt)]
    if text is not None:
        (tmp_path / "plan.yaml").write_text(text)
        words += ["--plan", str(tmp_path / "plan.yaml")]
    found = json.loads(generate(words, ranks)[0].splitlines()[-1])
    return [answer["tokens"] for answer in found["answers"]]


@pytest.mark.slow
def test_settings_and_ends_count_on_every_way_in(models: Callable[[str], Path], tmp_path: Path) -> None:
    """generation_config.json travels in a native checkpoint; without it config.json counts, in both."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer, prompts = AutoTokenizer.from_pretrained(models("llama")), PROMPTS[:2]
    free = expected(models("llama"), prompts)
    ends = [int(tokenizer.eos_token_id), free[0][9], free[1][5]]
    said = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "begin_suppress_tokens": [free[0][0]]}
    said["pad_token_id"] = 0
    for name, more in (("generation", said | {"stop_strings": [tokenizer.decode(free[1][2:3])]}), ("config", said)):
        hf, native = tmp_path / name, tmp_path / f"{name}_native"
        shutil.copytree(models("llama"), hf)
        (hf / "generation_config.json").unlink()
        if name == "generation":
            GenerationConfig(eos_token_id=ends, **more).save_pretrained(hf)
        else:
            config = json.loads((hf / "config.json").read_text()) | more | {"eos_token_id": ends}
            (hf / "config.json").write_text(json.dumps(config))
        model, wanted = AutoModelForCausalLM.from_pretrained(hf), []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            made = model.generate(ids, do_sample=False, max_new_tokens=NEW, tokenizer=tokenizer)
            wanted.append(made[0, ids.shape[1] :].tolist())
        assert min(map(len, wanted)) < NEW
        assert main(["convert", str(hf), str(native)]) == 0
        for flag, path in (("--load-hf", hf), ("--load", native)):
            assert answers([flag, str(path)], prompts, "one", tmp_path, []) == wanted, (name, flag)


def test_longrope_takes_the_factors_of_the_length_so_far(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Prompts on both sides of the original length, and an answer that crosses it, in one batch."""
    prompts = ("fox", PROMPTS[2][:20], PROMPTS[2])
    assert answers(["--load-hf", str(models("phi3"))], prompts, "one", tmp_path) == expected(models("phi3"), prompts)
