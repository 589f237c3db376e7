"""``torch.compile``, applied to a plain model stage from outside."""

from __future__ import annotations

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.model import GPTStage
from hetero_megatron.model.layers import CoreAttention
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.parallel.context import ContextAttention
from hetero_megatron.parallel.recompute import is_recomputed
from hetero_megatron.parallel.tensor import RowParallelLinear


def apply_compile(stage: GPTStage, backend: str) -> None:
    """Compile attention, MLP and norms of every layer, one graph each and one compilation for all layers of a kind.

    Collectives stay outside: they are in hooks around the modules or in modules that are left as they are.
    """
    for layer in stage.layers():
        if isinstance(layer.mlp, MoEMLP):
            raise UserError(
                "mixture-of-experts layers cannot be compiled: rows per expert are known only when they run",
                field="--compile", accepted="leave the flag out",
            )  # fmt: skip
        for module in layer.modules():
            again = module is not layer and is_recomputed(module)  # a whole layer's blocks are compiled inside it
            dropped = isinstance(module, CoreAttention) and module.dropout > 0  # its key is another in every call
            if again or dropped or isinstance(module, (RowParallelLinear, ContextAttention)):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        for block in (layer.norms()[0], layer.self_attn, layer.mlp):
            if block is None:
                continue
            block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
