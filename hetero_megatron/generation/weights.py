"""Where the weights of a model to look at come from: a Hugging Face directory, a checkpoint, an adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hetero_megatron.checkpoint.adapter import AdapterWeights
from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.hf_load import HFWeights, base_weights
from hetero_megatron.checkpoint.native import Checkpoint
from hetero_megatron.checkpoint.state import MODEL, check_model
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.empty_stage import fill
from hetero_megatron.spec import LogicalTensor, ModelSpec

if TYPE_CHECKING:
    from hetero_megatron.ops.int8_weight import Scales


class WeightSource(Protocol):
    """What a decoder's weights come from."""

    @property
    def elsewhere(self) -> Collection[str]:
        """Logical names of tensors that have memory already."""

    def fill(
        self, tensors: Mapping[str, tuple[LogicalTensor, Box, torch.Tensor]], scales: Mapping[str, Scales],
        world: Group,
    ) -> None:  # fmt: skip
        """Write the values of every box (by logical name) into its tensor, and of those in few bits into their scales.
        Called on all ranks of ``world``, when the decoder is built and each time that weights have changed."""


@dataclass(frozen=True)
class Weights:
    """``base``: of all tensors but adapters; ``checkpoint``: of trained ones, which are all without adapters.
    ``elsewhere``: names of those that have memory already: none."""

    spec: ModelSpec
    base: HFWeights | None = None
    adapter: AdapterWeights | None = None
    checkpoint: Checkpoint | None = None
    elsewhere: Collection[str] = ()

    def fill(
        self, tensors: Mapping[str, tuple[LogicalTensor, Box, torch.Tensor]], scales: Mapping[str, Scales],
        world: Group,
    ) -> None:  # fmt: skip
        """See :class:`WeightSource`."""
        for tensor, box, param in tensors.values():
            if tensor.trained and self.adapter is not None:
                param.copy_(self.adapter.read(tensor, box))
            elif self.base is not None and not (tensor.trained and self.spec.lora is not None):
                fill(tensor, box, self.base.read, param, scales)
        if self.checkpoint is not None:
            boxed = {
                f"{MODEL}.{name}": BoxedTensor(tensor.shape, [(box, param)])
                for name, (tensor, box, param) in tensors.items() if tensor.trained
            }  # fmt: skip
            self.checkpoint.read_into(boxed, world)


class SharedWeights:
    """Those of a rank's stage that is trained, which are shared, not copied.

    Args:
        params, scales: by logical name.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], scales: Mapping[str, Scales]) -> None:
        self._params, self._scales = params, scales

    @property
    def elsewhere(self) -> Collection[str]:
        return self._params.keys()

    def fill(
        self, tensors: Mapping[str, tuple[LogicalTensor, Box, torch.Tensor]], scales: Mapping[str, Scales],
        world: Group,
    ) -> None:  # fmt: skip
        """As :class:`WeightSource` says, but every tensor becomes the trained one's memory."""
        for name, (_, _, param) in tensors.items():
            param.data = self._params[name].detach()
        for name, of_weight in scales.items():
            of_weight.copy_(self._scales[name])  # type: ignore[arg-type]


def open_weights(
    spec: ModelSpec, load_hf: str | None, adapter: str | None, checkpoint: Checkpoint | None
) -> Weights:
    """Weights of a model; UserError if something is missing or does not fit."""
    if checkpoint is not None:
        check_model(checkpoint, spec)
    if load_hf is None and (checkpoint is None or spec.lora is not None):
        raise UserError(
            "missing: adapters need their base" if spec.lora is not None else "missing: the model's weights",
            field="--load-hf", accepted="a Hugging Face directory, or a name on the hub",
        )  # fmt: skip
    base = base_weights(load_hf, spec) if load_hf is not None and (checkpoint is None or spec.lora) else None
    return Weights(spec, base, AdapterWeights(adapter, spec) if adapter is not None else None, checkpoint)
