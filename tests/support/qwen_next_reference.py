"""transformers' Gated DeltaNet (Qwen3-Next, Qwen3.5) in the dtype of its inputs: its own text, without the casts to fp32 in it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def _exact(function: Callable[..., Any], scope: dict[str, Any]) -> Any:
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
    for name in _FUNCTIONS:
        _exact(inspect.unwrap(getattr(module, name)), scope)
    return scope


_SCOPES = {module.__name__: _scope(module) for module in (modeling, modeling_qwen3_5, modeling_qwen3_5_moe)}
chunked, recurrent = (_SCOPES[modeling.__name__][name] for name in _FUNCTIONS)


def make_exact_delta(module: Any, dtype: torch.dtype) -> None:
    """Of one module of a model with Gated DeltaNet in fp64."""
    if dtype == torch.float64:
        scope, kind = _SCOPES[type(module).__module__], type(module)
        module.forward = _exact(inspect.unwrap(kind.forward), dict(scope)).__get__(module)


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
