"""``torch.compile``, applied to a plain model stage from outside."""

from __future__ import annotations

import torch

from hetero_megatron.model import GPTStage
from hetero_megatron.model.layers import CoreAttention
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.parallel.context import ContextAttention
from hetero_megatron.parallel.recompute import is_recomputed
from hetero_megatron.parallel.tensor import RowParallelLinear


def apply_compile(stage: GPTStage, backend: str) -> None:
    """Compile attention, MLP and norms of every layer, one graph each and one compilation for all layers of a kind.

    Collectives stay outside: they are in hooks around the modules or in modules that are left as they are. Of a mixture
    of experts only the shared expert is compiled: how many rows an expert has is known when it runs.
    """
    for layer in stage.layers():
        for module in layer.modules():
            again = module is not layer and is_recomputed(module)  # a whole layer's blocks are compiled inside it
            dropped = isinstance(module, CoreAttention) and module.dropout > 0  # its key is another in every call
            if again or dropped or isinstance(module, (RowParallelLinear, ContextAttention)):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        mlp = layer.mlp.shared_expert if isinstance(layer.mlp, MoEMLP) else layer.mlp
        for block in (layer.norms()[0], layer.self_attn, mlp):
            if block is None:
                continue
            block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]
