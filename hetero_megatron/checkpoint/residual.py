"""The base of PiSSA and OLoRA adapters: what is left of a matrix once the adapters' first values are taken out.

PEFT stores A and B alone, and computes the first ones anew whenever it loads them: W + scale (B A - B0 A0). Both
decompositions are of whole matrices, so each rank that has a part of one reads and decomposes all of it.
"""

from __future__ import annotations

import torch

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, trained_tensors


def base_weights(directory: str, spec: ModelSpec) -> HFWeights:
    """--load-hf, as the base of the adapters that ``spec`` has, if any. UserError as of :class:`HFWeights`."""
    if spec.lora is None or spec.lora.residual is None:
        return HFWeights(directory, spec.base)
    return ResidualBase(directory, spec)


class ResidualBase(HFWeights):
    """``HFWeights`` whose adapted matrices are what is left of them."""

    def __init__(self, directory: str, spec: ModelSpec) -> None:
        super().__init__(directory, spec.base)
        assert spec.lora is not None
        self._lora = spec.lora
        self._adapted = {
            t.name.replace(".lora_A.weight", ".weight") for t in trained_tensors(spec) if ".lora_A." in t.name
        }
        self._last: tuple[str, torch.Tensor] = ("", torch.empty(0))  # a rank may read a matrix in several boxes

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        if tensor.name not in self._adapted or not box.size:
            return super().read(tensor, box)
        if self._last[0] != tensor.name:
            base_weight = super().read(tensor, Box.whole(tensor.shape))
            self._last = tensor.name, residual(base_weight, self._lora, tensor.name.removesuffix(".weight"))
        return self._last[1][box.slices()]


def residual(weight: torch.Tensor, lora: Lora, module: str) -> torch.Tensor:
    """W [outputs, inputs] of a module without the first parts of its decomposition, as many as its adapter has ranks,
    in at least fp32. The adapters' scale cancels in PiSSA, and counts in OLoRA."""
    wide_weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if not wide_weight.isfinite().all():  # neither decomposition exists: whoever reads the weights says so
        return weight
    rank = lora.site_of(module).rank
    if lora.residual == "pissa":
        u, s, vh = torch.linalg.svd(wide_weight, full_matrices=False)
        return wide_weight - (u[:, :rank] * s[:rank]) @ vh[:rank]
    q, r = torch.linalg.qr(wide_weight)
    return torch.sub(wide_weight, q[:, :rank] @ r[:rank], alpha=lora.scale(module))
