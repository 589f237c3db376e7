"""transformers' Gated DeltaNet in the dtype of its inputs: its own text, without the casts to fp32 in it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


def exact(function: Callable[..., Any], scope: dict[str, Any]) -> Any:
    """``function``, compiled again with fp64 where its text says fp32."""
    text = textwrap.dedent(inspect.getsource(function))
    for cast in ("torch.float32", ".float()"):
        text = text.replace(cast, cast.replace("float32", "float64").replace("float()", "double()"))
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("def "))
    exec("\n".join(lines[first:]), scope)
    return scope[function.__name__]


_SCOPE = dict(vars(modeling))
chunked, recurrent = (exact(inspect.unwrap(getattr(modeling, name)), _SCOPE) for name in _FUNCTIONS)
_mixer = exact(inspect.unwrap(modeling.Qwen3NextGatedDeltaNet.forward), _SCOPE)
_norm = exact(modeling.Qwen3NextRMSNormGated.forward, _SCOPE)


def make_exact_delta(module: Any, dtype: torch.dtype) -> None:
    """Of one module of a Qwen3-Next model in fp64."""
    if dtype == torch.float64:
        forward = _mixer if type(module).__name__ == "Qwen3NextGatedDeltaNet" else _norm
        module.forward = forward.__get__(module)


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
