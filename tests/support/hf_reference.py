"""Hugging Face models as the independent reference, made exact in fp64.

transformers computes RMS norms and rotary tables in fp32 whatever the dtype; for proofs in fp64 those two are
replaced by torch's own ``rms_norm`` and by tables computed in fp64. Everything else is transformers' code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from hetero_megatron.checkpoint.names import HFSource, name_table
from hetero_megatron.spec import ModelSpec, from_hf_config


def make_hf(config: dict[str, Any], seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.nn.Module, ModelSpec]:
    """A random Hugging Face model, its weights large enough that every term matters, and its spec."""
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(**config)
    hf_config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, dtype=torch.float32)
            is_norm = "norm" in name or ".ln_" in name
            scale = 0.02 if is_norm or name.endswith("bias") else 0.15
            param.copy_(noise * scale + (1.0 if is_norm and name.endswith("weight") else 0.0))
    model.eval()
    make_exact(model, dtype)
    return model, from_hf_config(config)


def make_exact(model: torch.nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _exact_rms_norm(module)  # type: ignore[method-assign]
        elif kind.endswith("RotaryEmbedding"):
            module.forward = _exact_rotary(module, dtype)  # type: ignore[method-assign]


def _exact_rms_norm(module: Any) -> Any:
    return lambda x: F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _exact_rotary(module: Any, dtype: torch.dtype) -> Any:
    inv_freq = exact_frequencies(module.config)
    # transformers computes the same numbers in fp32: so the rule below is not wrong in the same way as ours.
    torch.testing.assert_close(inv_freq.float(), module.inv_freq.float(), rtol=2e-6, atol=0)

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * inv_freq
        both = torch.cat([angles, angles], dim=-1)
        return both.cos().to(dtype), both.sin().to(dtype)

    return forward


def exact_frequencies(config: Any) -> torch.Tensor:
    """[head_dim / 2] fp64: the rules of transformers/modeling_rope_utils.py, pair by pair."""
    rope = config.rope_parameters
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = [rope["rope_theta"] ** (-2 * i / d) for i in range(d // 2)]
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        plain = [f / rope["factor"] for f in plain]
    elif kind == "llama3":
        plain = [_llama3_frequency(f, rope) for f in plain]
    return torch.tensor(plain, dtype=torch.float64)


def _llama3_frequency(frequency: float, rope: dict[str, Any]) -> float:
    context, wavelength = rope["original_max_position_embeddings"], 2 * math.pi / frequency
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / rope["factor"]
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def sliding_window(config: Any) -> int | None:
    """The window of all layers, as transformers reads it; layers of unlike kind are not tested here."""
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    assert len(kinds) == 1, kinds
    return getattr(config, "sliding_window", None) if kinds == {"sliding_attention"} else None


def _read(source: HFSource, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    value = tensors[source.name]
    if source.start is not None:
        value = value[..., source.start : source.stop]
    return value.T if source.transpose else value


def hf_to_logical(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Views of the model's parameters by logical name (contiguous copies where transposed)."""
    state = {n: p.detach() for n, p in model.named_parameters()}
    return {name: _read(source, state).contiguous() for name, source in name_table(spec).items()}


def hf_grads(model: torch.nn.Module, spec: ModelSpec) -> dict[str, torch.Tensor]:
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    return {name: _read(source, grads).contiguous() for name, source in name_table(spec).items()}


def hf_logits(
    model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, documents: list[list[int]] | None
) -> torch.Tensor:
    """Logits [b, s, V]; packed documents through an explicit block-diagonal causal mask."""
    b, s = tokens.shape
    kwargs: dict[str, Any] = {"position_ids": positions, "use_cache": False}
    dtype = next(model.parameters()).dtype
    allowed = torch.ones(s, s, dtype=torch.bool).tril().expand(b, 1, s, s).clone()
    for row, starts in enumerate(documents or []):
        for start in starts:
            allowed[row, :, start:, :start] = False
    window = sliding_window(model.config)
    if window is not None:
        allowed &= torch.ones(s, s, dtype=torch.bool).triu(1 - window)
    kwargs["attention_mask"] = torch.zeros(b, 1, s, s, dtype=dtype).masked_fill(~allowed, float("-inf"))
    return model(input_ids=tokens, **kwargs).logits  # type: ignore[no-any-return]


def hf_loss_sum(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
    documents: list[list[int]] | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Sum of the token losses that ``mask`` lets count, in the model's dtype."""
    b, s = tokens.shape
    logits = hf_logits(model, tokens, positions, documents)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(b, s)
    return losses.sum() if mask is None else (losses * mask).sum()
