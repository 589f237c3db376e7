"""Where a run's first weights come from: a Hugging Face directory, adapters in PEFT's form, or the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Group
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.spec import LogicalTensor
from hetero_megatron.training.adapters import adapters_of, finite
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.utils.text import listed, notice_line

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.hf_load import HFWeights


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
            from hetero_megatron.checkpoint.residual import base_weights

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
            found = self.source.read(tensor, box)
            return finite(tensor, found) if tensor.int8 else found
        return initial_values(tensor, box, self.config.spec, self.config.seed)

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
            self.source.read_masters(runtime.optimizer.owned(), runtime.dtype)
        ranks: list[list[str]] = runtime.world.gather_objects(list(self.source.nonfinite))
        nonfinite = [name for names in ranks for name in names]
        told = f"NaN or Inf in {listed(nonfinite)}, with which nothing is saved or exported"
        found = [told] if nonfinite else []
        masters = torch.promote_types(runtime.dtype, torch.float32)
        wide = [name for name, dtype in self.source.dtypes().items() if torch.promote_types(dtype, masters) != masters]
        if wide:
            found.append(f"float64 is rounded to the float32 of this run (--fp64 keeps it) in {listed(wide)}")
        if runtime.world.index == 0:
            for notice in [*self.source.notices, *found]:
                print(notice_line(f"--load-hf {self.config.load_hf}: {notice}"), flush=True)
