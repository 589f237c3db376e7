"""A run's adapters: where their first values come from, and where they go at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Group
from hetero_megatron.comm.refusals import together
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.int8_base import BaseWeights
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, logical_tensors
from hetero_megatron.spec.tensors import MAGNITUDE
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.runtime import Runtime

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.companions import Companions


class Adapters:
    """Of a model with adapters; built on every rank of the plan before the runtime."""

    def __init__(self, config: RunConfig) -> None:
        from hetero_megatron.checkpoint.adapter import AdapterWeights, check_target

        self.config, self.spec = config, config.spec
        options = config.adapter
        self._source = AdapterWeights(options.load, self.spec) if options.load is not None else None
        if options.save is not None:
            check_target(options.save, self.spec)

    def initialize(
        self, tensor: LogicalTensor, box: Box, base: Callable[[LogicalTensor, Box], torch.Tensor]
    ) -> torch.Tensor:
        """First values of a box of an adapter; ``base``: those of the model that it belongs to."""
        from hetero_megatron.parallel.dora import first_magnitude

        if self._source is not None:
            return self._source.read(tensor, box)
        module, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        if kind == MAGNITUDE:
            (weight,) = (t for t in logical_tensors(self.spec) if t.name == f"{module}.weight")
            whole_rows = Box((*box.lo, 0), (*box.hi, weight.shape[1]))
            return first_magnitude(base(weight, whole_rows), weight.int8)
        return initial_values(tensor, box, self.spec, self.config.seed)

    def complete(self, runtime: Runtime) -> None:
        """Master weights as exact as the file is."""
        if self._source is not None:
            assert runtime.optimizer is not None
            self._source.read_masters(runtime.optimizer.owned(), self.spec)

    def save(self, runtime: Runtime) -> str:
        """Write --save-adapter, in fp32 (fp64 of a run in fp64). Called on all ranks."""
        from hetero_megatron.checkpoint.adapter import save_adapter

        assert self.config.adapter.save is not None and runtime.optimizer is not None
        dtype = torch.promote_types(runtime.dtype, torch.float32)
        base = self.config.load_hf or self.config.model_directory
        owned = runtime.optimizer.owned()
        return save_adapter(self.config.adapter.save, self.spec, owned, dtype, runtime.world, base)

    def save_merged(self, runtime: Runtime, dtypes: Mapping[str, torch.dtype], along: Companions) -> str:
        """Write --save-hf: the base with the adapters merged into it. Called on all ranks."""
        from hetero_megatron.checkpoint.adapter import merged
        from hetero_megatron.checkpoint.hf_save import save_hf

        assert self.config.save_hf is not None
        base = self.spec.base
        rank, params = runtime.comm.rank, dict(runtime.model.named_parameters())
        held = BaseWeights(params, runtime.scales, runtime.dtype)
        buckets = CompiledPlan(runtime.plan, base).buckets
        owners = {
            name: layout.of(rank) for b in buckets for name, layout in b.owners.items() if rank in layout.ranks
        }
        gains = runtime.row_norms.gains() if runtime.row_norms is not None else {}
        owned = merged(self.spec, held, runtime.boxes, owners, gains)
        return save_hf(self.config.save_hf, base, owned, dtypes, runtime.world, along)


def adapters_of(config: RunConfig, world: Group) -> Adapters | None:
    """None for a model without adapters. Called on all ranks; UserError on all of them."""
    if config.spec.lora is None:
        return None
    made: list[Adapters] = []
    together(world, lambda: made.append(Adapters(config)))
    return made[0]


def finite(tensor: LogicalTensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` of a weight that is to be in 8 bits; UserError where some have no such form."""
    if not values.isfinite().all():
        raise UserError(
            "holds values that are not finite, which have no 8-bit form", field="--load-hf", value=tensor.name,
            accepted="a base of finite values, or no --lora-base-dtype",
        )  # fmt: skip
    return values
