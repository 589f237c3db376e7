"""First weights: a function of seed, tensor and element, so that no plan changes them."""

from __future__ import annotations

import hashlib
import math

import torch

from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.tensors import expert_tensor

BLOCK_ROWS = 256  # of a matrix, drawn from one generator each: a part of it needs no more


def initial_values(tensor: LogicalTensor, box: Box, spec: ModelSpec, seed: int) -> torch.Tensor:
    """fp32 values of ``box``: norms 1 (less the model's offset), biases and sinks 0, matrices normal(0, init_std).

    The projections that write into the residual stream (``o_proj``, ``down_proj``) get
    ``init_std / sqrt(2 * num_layers)``, as in GPT-2 and Megatron. Of an adapter, B is 0 and A uniform within
    1 / sqrt(inputs), as in PEFT. Of linear attention, the gated norm's weights, dt_bias and D are 1 and A_log is as in
    transformers; of Kimi Delta Attention both A_log and dt_bias.
    """
    kimi = spec.delta is not None and spec.delta.by_feature
    if tensor.name.endswith("A_log") and spec.delta is not None and spec.delta.mixer == "mamba2":
        return torch.arange(box.lo[0] + 1, box.hi[0] + 1, dtype=torch.float64).log()
    if tensor.name.endswith("A_log"):
        return _decays(tensor, seed, 1.0 if kimi else 0.01)[box.lo[0] : box.hi[0]]
    if kimi and tensor.name.endswith("linear_attn.dt_bias"):
        return _step_sizes(tensor, seed)[box.lo[0] : box.hi[0]]
    if tensor.name.endswith(("linear_attn.dt_bias", "linear_attn.norm.weight", "linear_attn.D")):
        return torch.ones(box.shape)
    if tensor.is_bias or tensor.name.endswith("sinks"):
        return torch.zeros(box.shape)
    if len(tensor.shape) == 1:
        return torch.full(box.shape, 1.0 - spec.norm_offset)
    if tensor.per_expert:  # one matrix per expert, as if it were a tensor by itself
        expert_values = [
            initial_values(expert, Box(box.lo[1:], box.hi[1:]), spec, seed)
            for expert in (expert_tensor(tensor, e) for e in range(box.lo[0], box.hi[0]))
        ]
        return torch.stack(expert_values) if expert_values else torch.empty(box.shape)
    if tensor.name.endswith("lora_B.weight"):
        return torch.zeros(box.shape)
    adapter = tensor.name.endswith("lora_A.weight")
    std = 1 / math.sqrt(tensor.shape[1]) if adapter else spec.init_std
    if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * spec.num_layers)
    out = torch.empty(box.shape)
    rows = tensor.shape[0]
    for block in range(box.lo[0] // BLOCK_ROWS, -(-box.hi[0] // BLOCK_ROWS)):
        start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows)
        generator = torch.Generator().manual_seed(_block_seed(seed, tensor.name, block))
        shape = (stop - start, tensor.shape[1])
        if adapter:
            values = torch.rand(shape, generator=generator).mul_(2).sub_(1)
        else:
            values = torch.randn(shape, generator=generator)
        lo, hi = max(start, box.lo[0]), min(stop, box.hi[0])
        if lo < hi:
            out[lo - box.lo[0] : hi - box.lo[0]] = values[lo - start : hi - start, box.lo[1] : box.hi[1]]
    return out.mul_(std)


def _decays(tensor: LogicalTensor, seed: int, least: float) -> torch.Tensor:
    """[value heads], logarithms of numbers drawn evenly from ``least`` to 16."""
    generator = torch.Generator().manual_seed(_block_seed(seed, tensor.name, 0))
    return torch.rand(tensor.shape, generator=generator).mul_(16 - least).add_(least).log_()


def _step_sizes(tensor: LogicalTensor, seed: int) -> torch.Tensor:
    """[value heads dk], of which the softplus is from 0.001 to 0.1, its logarithm drawn evenly."""
    generator = torch.Generator().manual_seed(_block_seed(seed, tensor.name, 0))
    low, high = math.log(1e-3), math.log(1e-1)
    steps = torch.rand(tensor.shape, generator=generator).mul_(high - low).add_(low).exp_()
    return steps + torch.log(-torch.expm1(-steps))


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
