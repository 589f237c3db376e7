"""Configurations of adapters and of generation, as peft and transformers write them, with keys changed; and whether
what is accepted gives the tokens that these libraries give."""

from __future__ import annotations

import copy
import json
import random
import shutil
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import mutate, planning

PROMPT, NEW = "the quick brown", 6
ADAPTER, GENERATION, TOKENIZER = "adapter_config.json", "generation_config.json", "tokenizer_config.json"
_PLAUSIBLE: tuple[Any, ...] = (
    True, False, None, 0, 1, 2, 5, 0.5, 1.3, 2.0, [], {}, [3], [[3]], [[3], [4, 5]], [[[7], 2.0]], [2, 1.5], "pissa",
    "olora", "gaussian", "eva", "loftq", "pissa_niter_4", ["q_proj"], {"q_proj": 4}, {"q_proj": 2}, {"v_proj": 8},
    ".*q_proj", r".*layers\.0\..*[qv]_proj", {r"layers\.1.*": 4}, [0], [1, 0], "layers", ["layers", "h"],
    "all-linear", "none", "all", "quantized", "dynamic", list(range(0, 300, 2)), "ing", ["he", "\\n"],
    *planning.HOSTILE,
)  # fmt: skip


def make_base(folder: Path) -> None:
    """A small model with its tokenizer, and an adapter of it."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.chat import TEMPLATES, chat_tokenizer

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=330, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    chat_tokenizer(folder / "model", TEMPLATES["chatml"])
    (folder / "model" / GENERATION).unlink(missing_ok=True)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(param, 0, 0.3)
    adapted.save_pretrained(folder / "adapter")


def adapter(rng: random.Random, folder: Path, base: Path) -> list[str]:
    shutil.copytree(base / "adapter", folder / "adapter")
    path = folder / "adapter" / ADAPTER
    if rng.random() < 0.5:
        _write_sites(rng, folder / "adapter", base / "model")
        if rng.random() < 0.6:  # as peft wrote it
            return [*_words(base / "model"), "--load-adapter", str(folder / "adapter")]
    _change(rng, path, json.loads(path.read_text()), _keys_of_adapters())
    return [*_words(base / "model"), "--load-adapter", str(folder / "adapter")]


def _write_sites(rng: random.Random, folder: Path, base: Path) -> None:
    """An adapter of some places only, with ranks and alphas of their own, written by peft; unless peft refuses it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(rng.randrange(100))
    chosen: dict[str, Any] = {"target_modules": rng.choice((
        ["q_proj", "down_proj"], "all-linear", r".*layers\.1\..*(q|o)_proj", r".*\.(k|v)_proj", ["mlp.up_proj"],
        ["layers.0.self_attn.o_proj", "v_proj"], r"(model\.)?layers\.[01]\.mlp\.(gate|up)_proj",
        ["gate_proj", "o_proj"],
    ))}  # fmt: skip
    more: dict[str, tuple[Any, ...]] = {
        "layers_to_transform": ([0], [1], 1, [0, 1]), "layers_pattern": ("layers", ["layers", "h"]),
        "exclude_modules": (["v_proj"], r".*layers\.0\..*", ["layers.1.self_attn.q_proj"], "q_proj"),
        "rank_pattern": ({"q_proj": 2}, {r"layers\.1\..*": 3}, {"^model.layers.0.self_attn.q_proj": 1, "q_proj": 6}),
        "alpha_pattern": ({"q_proj": 3}, {"o_proj": 1, "layers.0.mlp.up_proj": 9}), "use_rslora": (True,),
        "use_dora": (True,), "bias": ("none",), "fan_in_fan_out": (False,), "lora_alpha": (1, 16), "r": (1, 5),
    }  # fmt: skip
    chosen |= {key: rng.choice(values) for key, values in more.items() if rng.random() < 0.3}
    try:
        adapted = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **chosen)
        )
    except ValueError:
        return
    for name, param in adapted.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            torch.nn.init.normal_(param, 0, 0.3)
    adapted.save_pretrained(folder)


def generation(rng: random.Random, folder: Path, base: Path) -> list[str]:
    shutil.copytree(base / "model", folder / "model")
    value: dict[str, Any] = {"eos_token_id": rng.choice((1, [1, 7], None)), "pad_token_id": 0}
    if rng.random() < 0.25:  # the same keys count in config.json where there is no other file
        target = folder / "model" / "config.json"
        value = json.loads(target.read_text()) | value
    else:
        target = folder / "model" / GENERATION
    _change(rng, target, value, _keys_of_generation())
    return _words(folder / "model")


TEXT = "The QUICK brown fox\u00e9  jumps </s> over <think> dogs"


def tokenizer(rng: random.Random, folder: Path, base: Path) -> list[str]:
    """A tokenizer whose configuration is changed, and a text for it."""
    shutil.copytree(base, folder / "tokenizer")
    path = folder / "tokenizer" / TOKENIZER
    _change(rng, path, json.loads(path.read_text()), _keys_of_tokenizers())
    (folder / "d.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return ["preprocess", "--input", str(folder / "d.jsonl"), "--output-prefix", str(folder / "o"), "--tokenizer-model",
            str(folder / "tokenizer"), "--tokenizer-type", "HuggingFaceTokenizer"]  # fmt: skip


def unsaid(words: list[str], said: str) -> str:
    """How the tokens of a tokenizer that was accepted differ from transformers', or which key with a value, read by
    nobody, was not named; empty: nothing."""
    import numpy as np
    from transformers import AutoTokenizer

    folder = Path(words[words.index("--tokenizer-model") + 1])
    found = np.fromfile(folder.parent / "o_text_document.bin", np.uint16).tolist()
    wanted = AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    if found != wanted:
        return f"tokens {found}, of transformers {wanted}"
    keys = json.loads((folder / TOKENIZER).read_text())
    for key, value in keys.items():
        strange = key not in _keys_of_tokenizers() and not key.endswith("_token") and key[:60].isprintable()
        if strange and value not in (None, False, "", [], {}) and said.count(",") < 7 and key[:40] not in said:
            return f"nothing is said of {key}"
    return ""


def _words(model: Path) -> list[str]:
    return ["generate", "--load-hf", str(model), "--prompt", PROMPT, "--max-new-tokens", str(NEW), "--json"]


@cache
def _keys_of_adapters() -> tuple[str, ...]:
    import peft

    return tuple(sorted(f.name for f in fields(peft.LoraConfig)))


@cache
def _keys_of_tokenizers() -> tuple[str, ...]:
    """That transformers reads or writes."""
    from hetero_megatron.data.tokenizer_keys import KEYS

    return tuple(sorted(KEYS.accepted_keys))


@cache
def _keys_of_generation() -> tuple[str, ...]:
    from transformers import GenerationConfig

    return tuple(sorted(GenerationConfig().to_dict()))


def _change(rng: random.Random, path: Path, value: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Known keys with values that somebody may mean, unknown ones, and now and then any damage."""
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(keys)
        if rng.random() < 0.15:
            key = rng.choice((key[:-1], f"{key}s", key.upper(), f"use_{key}"))
        value[key] = copy.deepcopy(rng.choice(_PLAUSIBLE)) if rng.random() < 0.8 else mutate.odd_value(rng)
    damage = rng.random()
    data = json.dumps(mutate.tree(rng, value) if damage < 0.1 else value).encode()
    path.write_bytes(mutate.bytes_of(rng, data) if 0.1 < damage < 0.15 else data)
    if damage > 0.97:
        mutate.file(rng, path)


def differs(kind: str, words: list[str], shown: str) -> str:
    """How the tokens of a command that was accepted differ from those of peft and transformers; empty if they do not,
    or these refuse the file themselves."""
    import torch
    from transformers import AutoTokenizer

    directory = Path(words[words.index("--load-hf") + 1])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    try:
        model = _reference(kind, directory, words[-1])
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        more = {"eos_token_id": tokenizer.eos_token_id} if model.generation_config.eos_token_id is None else {}
        with torch.no_grad():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
                tokenizer=tokenizer, return_dict_in_generate=False, **more,
            )  # fmt: skip
    except Exception:  # whatever the library says of a file that is not its own
        return ""
    wanted, found = made[0, ids.shape[1] :].tolist(), json.loads(shown.splitlines()[-1])["answers"][0]["tokens"]
    return "" if wanted == found else f"tokens {found}, of the library {wanted}"


def _reference(kind: str, directory: Path, adapter: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    if kind == "adapters":
        import peft

        return peft.PeftModel.from_pretrained(model, adapter).eval()
    return model
