"""Where a run's first weights come from: a Hugging Face directory, adapters in PEFT's form, or the seed; and how
adapters are written again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Group
from hetero_megatron.comm.group import together
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.empty_stage import BaseWeights
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, logical_tensors
from hetero_megatron.spec.tensors import MAGNITUDE
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import listed, notice_line

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.hf_load import HFWeights
    from hetero_megatron.checkpoint.model_files import ModelFiles

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
            whole_rows = Box((*box.lo, 0), (*box.hi, weight.shape[-1]))
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
        dtype = torch.promote_types(runtime.stage_model.dtype, torch.float32)
        base = self.config.load_hf or self.config.model_directory
        owned = runtime.optimizer.owned()
        return save_adapter(self.config.adapter.save, self.spec, owned, dtype, runtime.world, base)

    def save_merged(self, runtime: Runtime, dtypes: Mapping[str, torch.dtype], along: ModelFiles) -> str:
        """Write --save-hf: the base with the adapters merged into it. Called on all ranks."""
        from hetero_megatron.checkpoint.adapter import merged, merged_pieces
        from hetero_megatron.checkpoint.hf_save import save_hf

        assert self.config.save_hf is not None
        base = self.spec.base
        rank, built = runtime.comm.rank, runtime.stage_model
        base_weights = BaseWeights(dict(built.module.named_parameters()), built.scales, built.dtype)
        compiled = CompiledPlan(runtime.here.plan, self.spec)
        dividing = {name: b.ranks for b in reversed(compiled.frozen) for name in b.names}  # the first stage that does
        owners = {
            name: layout.of(rank) for b in CompiledPlan(runtime.here.plan, base).buckets if b.onward is None
            for name, layout in b.owners.items() if name not in dividing and rank in layout.ranks
        }  # fmt: skip
        gains = built.row_norms.gains() if built.row_norms is not None else {}
        kept = runtime.divided.owned() if runtime.divided is not None else ()
        device = runtime.comm.device  # rows may be in host memory
        pieces = ((piece, rows.to(device)) for piece, rows in kept if rank in dividing[piece.name])
        owned = chain(
            merged(self.spec, base_weights, built.boxes, owners, gains),
            merged_pieces(self.spec, base_weights, pieces),
        )
        return save_hf(self.config.save_hf, base, owned, dtypes, runtime.world, along)


def adapters_of(config: RunConfig, world: Group) -> Adapters | None:
    """None for a model without adapters. Called on all ranks; UserError on all of them."""
    if config.spec.lora is None:
        return None
    adapters: list[Adapters] = []
    together(world, lambda: adapters.append(Adapters(config)))
    return adapters[0]


def finite(tensor: LogicalTensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` of a weight that is to be in 8 bits; UserError where some have no such form."""
    if not values.isfinite().all():
        raise UserError(
            "holds values that are not finite, which have no form in few bits", field="--load-hf", value=tensor.name,
            accepted="a base of finite values, or no --lora-base-dtype",
        )  # fmt: skip
    return values


class InitialWeights:
    """Built on every rank of the plan, before the model: a mistyped path is known at once.

    Args:
        world: the plan's ranks, which refuse together.

    Attributes:
        source: --load-hf; None: not given.
        adapters: None for a model without adapters.

    Raises:
        UserError: a directory holds other tensors than the model's.
    """

    def __init__(self, config: RunConfig, world: Group) -> None:
        self.config = config
        self.source: HFWeights | None = None
        if config.load_hf is not None:
            from hetero_megatron.checkpoint.hf_load import base_weights

            self.source = base_weights(config.load_hf, config.spec)
        self.adapters = adapters_of(config, world)

    @property
    def dtypes(self) -> dict[str, torch.dtype] | None:
        """Of the base's tensors in --load-hf, by logical name; None: drawn from the seed."""
        return self.source.dtypes() if self.source is not None else None

    def values(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        """A box of a logical tensor, of the box's shape, in the host's memory and the source's dtype.

        Raises:
            UserError: it cannot be read, or holds what a weight in 8 bits cannot.
        """
        if self.adapters is not None and tensor.trained:
            return self.adapters.initialize(tensor, box, self.values)
        if self.source is not None:
            values_read = self.source.read(tensor, box)
            return finite(tensor, values_read) if tensor.int8 or tensor.nf4 else values_read
        return initial_values(tensor, box, self.config.spec, self.config.seed)

    def blank(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        """The same where what is trained is filled later, from elsewhere."""
        return torch.zeros(box.shape) if tensor.trained else self.values(tensor, box)

    def complete(self, runtime: Runtime) -> None:
        """Make the optimizer's masters as exact as the files are, and print what a user should know about these.

        Called on all ranks of the plan, once the runtime is built.
        """
        assert runtime.optimizer is not None
        if self.adapters is not None:
            self.adapters.complete(runtime)
        if self.source is None:
            return
        if self.adapters is None:
            self.source.read_masters(runtime.optimizer.owned(), runtime.stage_model.dtype)
        ranks: list[list[str]] = runtime.world.gather_objects(list(self.source.nonfinite))
        nonfinite = [name for names in ranks for name in names]
        nonfinite_notice = f"NaN or Inf in {listed(nonfinite)}, with which nothing is saved or exported"
        notices = [nonfinite_notice] if nonfinite else []
        masters = torch.promote_types(runtime.stage_model.dtype, torch.float32)
        float64_names = [
            name for name, dtype in self.source.dtypes().items() if torch.promote_types(dtype, masters) != masters
        ]
        if float64_names:
            notices.append(
                f"float64 is rounded to the float32 of this run (--fp64 keeps it) in {listed(float64_names)}"
            )
        if runtime.world.index == 0:
            for notice in [*self.source.notices, *notices]:
                print(notice_line(f"--load-hf {self.config.load_hf}: {notice}"), flush=True)
