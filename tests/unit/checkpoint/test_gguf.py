"""GGUF files: transformers' own reader gets the same model from them, gguf's the same bits; what they cannot say is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_megatron.checkpoint.gguf_file import architecture_of
from hetero_megatron.checkpoint.gguf_tokenizer import PATTERNS, tokenizer_fields
from hetero_megatron.cli.convert import main
from hetero_megatron.errors import UserError
from hetero_megatron.spec.hf_config import from_hf_config

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "query_pre_attn_scalar": 16}
GEMMA3 = {"num_hidden_layers": 7, **WINDOWS}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 70000.0},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "gemma2": {"model_type": "gemma2", **WINDOWS},
    "gemma3": {"model_type": "gemma3_text", **GEMMA3},
}


def directory(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    known = AutoConfig.for_model(**{**SIZES, **config})
    model = AutoModelForCausalLM.from_config(known, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # of ones and zeros a wrong one would not be seen
            parameter.data.normal_(0.5, 0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", [*MODELS])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    model = directory(tmp_path / "hf", MODELS[name])
    assert main([str(tmp_path / "hf"), str(tmp_path / "model.gguf")]) == 0
    # transformers reads neither frequencies nor, of other families, sizes of heads and softcaps: there it is told.
    told = {} if name in ("llama", "llama tied", "mistral") else {"config": model.config}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32, **told).eval()
    tokens = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


def test_tensors_are_the_same_bits_from_a_checkpoint_too(tmp_path: Path) -> None:
    model = directory(tmp_path / "hf", MODELS["qwen2"], torch.bfloat16)
    assert main([str(tmp_path / "hf"), str(tmp_path / "native")]) == 0
    for source in ("hf", "native"):
        assert main([str(tmp_path / source), str(tmp_path / f"{source}.gguf")]) == 0
    assert (tmp_path / "hf.gguf").read_bytes() == (tmp_path / "native.gguf").read_bytes()
    found = {t.name: t for t in GGUFReader(tmp_path / "hf.gguf").tensors}
    weights = model.state_dict()
    for name, wanted in {
        "blk.2.attn_q.weight": "model.layers.2.self_attn.q_proj.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight", "output.weight": "lm_head.weight",
    }.items():  # fmt: skip
        assert found[name].tensor_type.name == "BF16"
        bits = weights[wanted].view(torch.int16).numpy()
        assert np.array_equal(np.asarray(found[name].data).view(np.int16).reshape(bits.shape), bits)
    bias = np.asarray(found["blk.1.attn_k.bias"].data)
    assert np.array_equal(bias, weights["model.layers.1.self_attn.k_proj.bias"].float().numpy())
    assert len(found) == len(weights)


def test_frequencies_of_llama3_are_those_of_transformers(tmp_path: Path) -> None:
    model = directory(tmp_path / "hf", MODELS["llama3"])
    assert main([str(tmp_path / "hf"), str(tmp_path / "m.gguf")]) == 0
    found = {t.name: np.asarray(t.data) for t in GGUFReader(tmp_path / "m.gguf").tensors}
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    wanted = model.model.rotary_emb.inv_freq.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(plain / found["rope_freqs.weight"], wanted, rtol=1e-5)


def test_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    for config, words in (
        ({"model_type": "mistral", "sliding_window": 8}, "layer 0 sees 8 tokens"),
        ({"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"] * 4}, "sees all tokens"),
        ({"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 64}, "scores are scaled by 0.125"),
        ({"model_type": "gemma2", **WINDOWS, "hidden_activation": "gelu"}, "its activation is geglu"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0, **GEMMA3}, "no soft caps"),
        ({"model_type": "qwen2", "rope_parameters": LLAMA3}, "stretched by llama3"),
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, "no conversion of phi"),
    ):
        with pytest.raises(UserError, match=words):
            architecture_of(from_hf_config(AutoConfig.for_model(**{**SIZES, **config}).to_dict()))
    (tmp_path / "there.gguf").write_text("mine")
    directory(tmp_path / "hf", MODELS["llama"])
    with pytest.raises(UserError, match=r"there\.gguf: exists"):
        main([str(tmp_path / "hf"), str(tmp_path / "there.gguf")])
    assert (tmp_path / "there.gguf").read_text() == "mine"


def bpe(pattern: str | None, whole_words: bool, **more: Any) -> dict[str, bytes]:
    """Files of a byte-level BPE with three tokens, one merge and one added token."""
    steps: list[dict[str, Any]] = [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": pattern is None}]
    if pattern is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "ignore_merges": whole_words}
    added = [{"id": 3, "content": "<end>", "special": True}]
    made = {"model": model | more, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "added_tokens": added}
    settings = {"eos_token": {"content": "<end>"}, "add_bos_token": False, "chat_template": "{{ messages }}"}
    return {"tokenizer.json": json.dumps(made).encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def test_tokenizers() -> None:
    for (pattern, whole), name in PATTERNS.items():
        fields, notices = tokenizer_fields(bpe(pattern, whole), 6)
        found = dict(fields)
        assert found["add_tokenizer_pre"] == name and found["add_token_merges"] == ["a b"] and not notices
        assert found["add_token_list"] == ["a", "b", "ab", "<end>", "[PAD4]", "[PAD5]"]
        assert found["add_token_types"] == [1, 1, 1, 3, 5, 5] and found["add_eos_token_id"] == 3
        assert found["add_chat_template"] == "{{ messages }}" and found["add_add_bos_token"] is False
    assert tokenizer_fields({}, 6)[0] == []
    for files, words in (
        (bpe(r"\w+", False), "splits text by"), (bpe(None, True), "splits text by"),
        (bpe(None, False, byte_fallback=True), "without the scores"), (bpe(None, False, type="Unigram"), "no BPE"),
        (bpe(None, False, vocab={"a": 9}), "beyond the model's 6 rows"), ({"tokenizer.json": b"["}, "no JSON object"),
        ({"tokenizer.model": b"\x0a\xff"}, "damaged"), ({"tokenizer.model": b""}, "holds no pieces"),
        ({"tokenizer.model": b"\xff" * 40}, "damaged"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            tokenizer_fields(files, 6)


def test_pieces_of_sentencepiece() -> None:
    """As protobuf writes them: (text, score, kind), the kind left out where it is NORMAL."""
    def piece(text: str, score: float, kind: int | None) -> bytes:
        body = bytes([10, len(text.encode())]) + text.encode() + b"\x15" + np.float32(score).tobytes()
        body += b"" if kind is None else bytes([24, kind])
        return bytes([10, len(body)]) + body

    model = piece("<unk>", 0.0, 2) + piece("<0x0A>", 0.0, 6) + piece("▁a", -1.5, None) + bytes([18, 2, 8, 1])
    found = dict(tokenizer_fields({"tokenizer.model": model}, 4)[0])
    assert found["add_token_list"] == ["<unk>", "<0x0A>", "▁a", "[PAD3]"]
    assert found["add_token_types"] == [2, 6, 1, 5] and found["add_token_scores"][2] == -1.5
