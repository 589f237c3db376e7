"""GPTStage equals transformers' models: logits, losses and gradients in fp64, family by family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_megatron.checkpoint.names import stored_tensors
from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage, initial_values
from hetero_megatron.model.layers import Context
from hetero_megatron.ops import cross_entropy, rope_frequencies, rope_tables
from hetero_megatron.spec import ModelSpec, logical_tensors, shares, stage_tensors, tensor_box, whole_share
from tests.support.families import DENSE
from tests.support.hf_reference import hf_grads, hf_logits, hf_loss_sum, hf_to_logical, make_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # one frequency kept, one blended, the rest stretched
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_gqa": LLAMA,
    "llama_mha": LLAMA | {"num_key_value_heads": 4},
    "llama_biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_tied": LLAMA | {"tie_word_embeddings": True},
    "llama3_scaling": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "head_dim": 16},
    "linear_scaling": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral_window": LLAMA | {"model_type": "mistral", "sliding_window": 5},
    "mistral_head_dim": LLAMA | {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen2_window": LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "qwen3_tied": LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 8},
    "gpt2": GPT2,
    "gpt2_untied_relu2": GPT2 | {"tie_word_embeddings": False, "activation_function": "relu2", "n_inner": 50},
    **DENSE,
}
DOCUMENTS = [[0, 3, 4, 12], [0], [0, 9]]


def micro_batch(vocab: int, documents: list[list[int]] | None, b: int = 3, s: int = 17) -> Any:
    tokens = torch.randint(0, vocab, (b, s + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(s).repeat(b, 1)
    for row, starts in enumerate(documents or []):
        for start in starts:
            positions[row, start:] = torch.arange(s - start)
    return SimpleNamespace(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], positions=positions, documents=documents, loss_mask=None,
        draws=None,
    )  # fmt: skip


def build(spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, **changes: Any) -> GPTStage:
    what = {
        "share": whole_share(spec),
        "layers": range(spec.num_layers),
        "embed": True,
        "head": True,
        "seq_length": 17,
    } | changes
    stage = GPTStage(
        spec, what["share"], what["layers"], what["embed"], what["head"], dtype=dtype, seq_length=what["seq_length"]
    )
    held = {t.name: t for t in stage_tensors(spec, what["layers"], what["embed"], what["head"])}
    params = dict(stage.named_parameters())
    assert params.keys() == held.keys()
    with torch.no_grad():
        for name, param in params.items():
            box = tensor_box(held[name], what["share"])
            assert tuple(param.shape) == box.shape, name
            param.copy_(weights[name][box.slices()])
    return stage


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().abs().max() / want.detach().abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, packed: bool) -> None:
    hf, spec = make_hf(FAMILIES[family], seed=3)
    weights = hf_to_logical(hf, spec)
    assert weights.keys() == {t.name for t in logical_tensors(spec)} == {t.name for _, t in stored_tensors(spec)}
    assert all(tuple(weights[t.name].shape) == t.shape for t in logical_tensors(spec))
    stage = build(spec, weights, torch.float64)
    batch = micro_batch(spec.vocab_size, DOCUMENTS if packed else None)
    mask = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(2)) < 0.8

    want = hf_logits(hf, batch.tokens, batch.positions, batch.documents)
    assert error(stage(batch.tokens, batch), want) < 1e-12
    want_loss = hf_loss_sum(hf, batch.tokens, batch.labels, batch.positions, batch.documents, mask)
    loss = (cross_entropy(stage(batch.tokens, batch), batch.labels) * mask).sum()
    torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
    want_loss.backward()
    loss.backward()
    grads = hf_grads(hf, spec)
    for name, param in stage.named_parameters():
        assert param.grad is not None, name
        assert error(param.grad, grads[name]) < 1e-9, name


@pytest.mark.parametrize("family", ["llama_gqa", "gpt2", "qwen3_tied"])
def test_equals_transformers_in_fp32(family: str) -> None:
    """Unpatched transformers code would differ here only by rounding; the patched one is as close."""
    hf, spec = make_hf(FAMILIES[family], seed=4, dtype=torch.float32)
    stage = build(spec, hf_to_logical(hf, spec), torch.float32)
    batch = micro_batch(spec.vocab_size, None)
    want = hf_logits(hf, batch.tokens, batch.positions, None)
    assert error(stage(batch.tokens, batch), want) < 1e-5


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "qwen3"])
def test_a_pipeline_of_stages_equals_one(family: str) -> None:
    """Cuts at any layer, a stage without layers, and the tied matrix in two stages."""
    hf, spec = make_hf(FAMILIES[family], seed=5)
    weights = hf_to_logical(hf, spec)
    batch = micro_batch(spec.vocab_size, DOCUMENTS)
    first = build(spec, weights, torch.float64, layers=[0], head=False)
    middle = build(spec, weights, torch.float64, layers=[1], embed=False, head=False)
    last = build(spec, weights, torch.float64, layers=[], embed=False)
    logits = last(middle(first(batch.tokens, batch), batch), batch)
    assert error(logits, hf_logits(hf, batch.tokens, batch.positions, batch.documents)) < 1e-12


@pytest.mark.parametrize("split", [(1, 1, 1), (5, 1, 2), (3, 2)])
@pytest.mark.parametrize("family", ["llama_gqa", "qwen3", "gpt2", "llama_biases"])
def test_shares_of_a_layer_sum_to_the_whole(family: str, split: tuple[int, ...]) -> None:
    """Ranks without heads run, query heads find their key-value head, and partial sums add up."""
    hf, spec = make_hf(FAMILIES[family], seed=6)
    weights = hf_to_logical(hf, spec)
    batch = micro_batch(spec.vocab_size, DOCUMENTS)
    x = torch.randn(3, 17, spec.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    ropes = {r: rope_tables(batch.positions, rope_frequencies(r, spec.head_dim), x.dtype) for r in spec.ropes}
    context = Context(batch.documents, ropes)

    def parts(stage: GPTStage) -> tuple[torch.Tensor, torch.Tensor]:
        (layer,) = stage.layers()
        outs = []
        for out, row in (
            (layer.self_attn(x, context), layer.self_attn.o_proj),
            (layer.mlp(x), layer.mlp.down_proj),
        ):
            outs.append(out if row.bias is None else out - row.bias)
        return outs[0], outs[1]

    want = parts(build(spec, weights, torch.float64, layers=[1], embed=False, head=False))
    every = [
        parts(build(spec, weights, torch.float64, share=share, layers=[1], embed=False, head=False))
        for share in shares(spec, split)
    ]
    for i in range(2):
        assert error(torch.stack([p[i] for p in every]).sum(0), want[i]) < 1e-12
    torch.stack([p[0] for p in every]).sum().backward()


def test_a_rank_without_heads_and_without_vocabulary_runs() -> None:
    spec = make_hf(LLAMA, seed=0)[1]
    share = shares(spec, (1, 1, 30))[0]
    assert share.q_heads == (0, 0) == share.kv_heads
    share = type(share)(share.q_heads, share.kv_heads, share.ffn, (0, 0))
    weights = {t.name: initial_values(t, Box.whole(t.shape), spec, 0) for t in logical_tensors(spec)}
    stage = build(spec, weights, torch.float32, share=share, layers=[0], embed=False)
    x = torch.randn(1, 5, 32, requires_grad=True)
    batch = SimpleNamespace(positions=torch.arange(5)[None], documents=[[0, 2]], loss_mask=None, draws=None)
    logits = stage(x, batch)
    assert logits.shape == (1, 5, 0)
    logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_runs_close_to_fp64(dtype: torch.dtype) -> None:
    hf, spec = make_hf(FAMILIES["llama_gqa"], seed=8)
    weights = hf_to_logical(hf, spec)
    batch = micro_batch(spec.vocab_size, DOCUMENTS)
    stage = build(spec, weights, dtype)
    logits = stage(batch.tokens, batch)
    assert logits.dtype == dtype
    assert error(logits.double(), hf_logits(hf, batch.tokens, batch.positions, batch.documents)) < 5e-2
    losses = cross_entropy(logits, batch.labels)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stage.parameters())


def test_initial_weights_do_not_depend_on_how_they_are_cut() -> None:
    spec = ModelSpec("m", "llama", 2, 32, 700, 4, 2, 8, 1000, 64, qkv_bias=True)
    for tensor in logical_tensors(spec):
        whole = initial_values(tensor, Box.whole(tensor.shape), spec, seed=5)
        assert whole.dtype == torch.float32
        for share in shares(spec, (3, 1, 2)):
            box = tensor_box(tensor, share)
            assert torch.equal(initial_values(tensor, box, spec, seed=5), whole[box.slices()]), tensor.name
        if len(tensor.shape) == 2:
            assert not torch.equal(initial_values(tensor, Box.whole(tensor.shape), spec, seed=6), whole)
            scale = 0.5 if tensor.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0  # 1 / sqrt(2 * 2)
            assert abs(float(whole.std()) / (spec.init_std * scale) - 1) < 0.1, tensor.name
        else:
            assert (whole == (0 if tensor.name.endswith("bias") else 1)).all()


def test_no_two_tensors_or_blocks_start_alike() -> None:
    spec = ModelSpec("m", "llama", 2, 16, 40, 4, 2, 4, 600, 64)
    first = [
        tuple(initial_values(t, Box.whole(t.shape), spec, 0)[row, :4].tolist())
        for t in logical_tensors(spec) if len(t.shape) == 2 for row in range(0, t.shape[0], 256)
    ]  # fmt: skip
    assert len(set(first)) == len(first)
