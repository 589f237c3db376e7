"""transformers' linear attention (Qwen3-Next, Qwen3.5, Kimi Linear) in the dtype of its inputs: its own text, without
the casts to fp32 in it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.kimi_linear import modeling_kimi_linear as modeling_kimi
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_OF_KIMI = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


def exact(function: Callable[..., Any], scope: dict[str, Any]) -> Any:
    """``function``, compiled again with fp64 where its text says fp32."""
    text = textwrap.dedent(inspect.getsource(function))
    for cast in ("torch.float32", ".float()"):
        text = text.replace(cast, cast.replace("float32", "float64").replace("float()", "double()"))
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def "))
    exec("\n".join(lines[first:]), scope)
    return scope[function.__name__]


def _scope(module: Any) -> dict[str, Any]:
    """The names of a model's file, with its rules in fp64."""
    scope = dict(vars(module))
    for name in (name for name in _FUNCTIONS + _OF_KIMI if hasattr(module, name)):
        exact(inspect.unwrap(getattr(module, name)), scope)
    return scope


_MODULES = (modeling, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_kimi)
_SCOPES = {module.__name__: _scope(module) for module in _MODULES}
chunked, recurrent = (_SCOPES[modeling.__name__][name] for name in _FUNCTIONS)
kimi_chunked, kimi_recurrent = (_SCOPES[modeling_kimi.__name__][name] for name in _OF_KIMI)


def has_delta(module: Any) -> bool:
    """Whether a module is a part of linear attention that transformers computes in fp32."""
    kind = type(module).__name__
    ends = ("GatedDeltaNet", "RMSNormGated", "DeltaAttention", "ForgetGate")
    return type(module).__module__ in _SCOPES and kind.endswith(ends)


def kimi_values(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a Kimi Linear model in memory, named and divided as in its files, but for routed experts."""
    found = dict[str, torch.Tensor]()
    for name, value in values.items():
        name = name.replace(".forget_gate.", ".").replace(".mlp.gate.", ".block_sparse_moe.gate.")
        name = name.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")
        if name.endswith("self_attn.conv1d.weight"):
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                found[name.replace("conv1d", f"{letter}_conv1d")] = part
        else:
            found[name] = value
    return found


def make_exact_delta(module: Any, dtype: torch.dtype) -> None:
    """Of one module of a model with Gated DeltaNet in fp64."""
    if dtype == torch.float64:
        scope, kind = _SCOPES[type(module).__module__], type(module)
        module.forward = exact(inspect.unwrap(kind.forward), dict(scope)).__get__(module)


def by_document(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tokens: torch.Tensor, positions: torch.Tensor,
    documents: list[list[int]],
) -> torch.Tensor:  # fmt: skip
    """Logits [b, s, V] of rows whose documents do not meet: transformers' state would go on from one to the next, so
    each is a row of its own."""
    rows = []
    for row, starts in enumerate(documents):
        bounds = [*starts, tokens.shape[1]]
        parts = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        rows.append(torch.cat([run(tokens[row : row + 1, p], positions[row : row + 1, p]) for p in parts], 1))
    return torch.cat(rows)
