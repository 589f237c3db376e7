"""The model of one rank's stage: its layers, filled, and divided as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box, cut
from hetero_megatron.model.gpt import MLP
from hetero_megatron.model.layers import Attention, Linear
from hetero_megatron.model.moe import GroupedLinear, Router, SharedGate
from hetero_megatron.ops import KernelPlan
from hetero_megatron.parallel.empty_stage import EmptyStage, empty_stage, fill
from hetero_megatron.parallel.experts import apply_expert_parallel
from hetero_megatron.parallel.recompute import apply_recompute
from hetero_megatron.parallel.tensor import RowParallelLinear, apply_tensor_parallel
from hetero_megatron.pipeline.rank_stage import RankStage
from hetero_megatron.plan.experts import rank_shares
from hetero_megatron.spec import Dropout, LogicalTensor, stage_tensors
from hetero_megatron.utils.text import tracked

if TYPE_CHECKING:
    from hetero_megatron.parallel.lora import RowNorms

# (logical tensor, box) -> its values there, of the box's shape, in any dtype, in host memory
Initialize = Callable[[LogicalTensor, Box], torch.Tensor]


class StageModel:
    """Built alike on every rank of the stage.

    Args:
        here: the stage; dtype: of parameters and activations.
        kernels: of this rank.
        initialize: initial values, of every tensor of the stage in turn.
        dropout: in training.

    Attributes:
        module: maps tokens [b, s] or a stage's input [b, s, h] to hidden states or logits.
        boxes: of each parameter in its logical tensor, by logical name.
        scales: of frozen weights in 8 bits, by logical name.
        row_norms: of a model with DoRA; to be refreshed before every step.
    """

    def __init__(
        self,
        here: RankStage,
        comm: Comm,
        dtype: torch.dtype,
        kernels: KernelPlan,
        initialize: Initialize,
        dropout: Dropout,
    ) -> None:
        self.here, self.comm, self.kernels = here, comm, kernels
        stage, spec = here.stage, here.spec
        made = empty_stage(spec, stage, here.share, dtype, comm.device, kernels, here.plan.seq_length, dropout)
        self.module, self.boxes, self.scales = made.module, made.boxes, made.scales
        self.row_norms: RowNorms | None = None
        if spec.lora is not None and spec.lora.dora:
            from hetero_megatron.parallel.lora import RowNorms

            self.row_norms = RowNorms(self.module, made.tensors, spec.lora.scale, comm.group(here.unit.ranks))
        _fill(made, initialize)
        self._divide()
        apply_recompute(self.module, stage.recompute)

    def _divide(self) -> None:
        """Tensor, context and expert parallelism, around the layers."""
        here, comm, model = self.here, self.comm, self.module
        unit, stage = here.unit, here.stage
        shards = tuple(b - a for a, b in cut(unit.num_tokens, [1] * unit.tp))
        heads = [rank_shares(here.spec, stage)[rank].kv_heads for rank in unit.ranks]
        apply_tensor_parallel(model, comm.group(unit.ranks), shards, here.share.vocab, heads)
        intervals = [torch.arange(a, b, device=comm.device) for a, b in unit.tokens or ((0, 0),)]
        model.token_numbers = torch.cat(intervals)
        if here.context is not None:
            from hetero_megatron.ops.tile_kernels import tile_kernel
            from hetero_megatron.parallel.context import apply_context_parallel

            choices = self.kernels.choices
            kernel = tile_kernel(comm.device, choices["attention"].kernel, here.spec.attn_softcap)
            apply_context_parallel(model, here.context, comm, kernel, choices["attn_merge"].kernel.forward)
        apply_expert_parallel(model, stage, comm, here.plan.islands)

    def chunk_names(self) -> list[list[str]]:
        """Trained parameters of each chunk; the embedding of a tied head is in the chunk of either."""
        stage = self.here.stage
        return [
            [t.name for t in stage_tensors(
                self.here.spec, range(a, b), stage.embed and c == 0, stage.head and c + 1 == len(stage.chunks)
            ) if t.trained]
            for c, (a, b) in enumerate(stage.chunks)
        ]  # fmt: skip

    def products(self, head: bool) -> Iterator[Sequence[torch.Tensor]]:
        """Trained weights that a forward uses once, each in a product, and those of one product together; a tied head's
        is the embedding's, too, where the stage has both.

        Args:
            head: whether the model applies the head, and not the loss.
        """
        kinds = (Linear, RowParallelLinear, GroupedLinear, Router, SharedGate)
        for module in self.module.modules():
            if isinstance(module, kinds) and module.weight.requires_grad:
                yield (module.weight,)
            if isinstance(module, (Attention, MLP)) and module.together[0].weight.requires_grad:
                yield [linear.weight for linear in module.together]
        spec, stage = self.here.spec, self.here.stage
        if head and stage.head and spec.lora is None and not (spec.tied and stage.embed):
            yield (self.module.lm_head.matrix,)


@torch.no_grad()
def _fill(made: EmptyStage, initialize: Initialize) -> None:
    params = made.parameters()
    total = sum(param.numel() for param in params.values())
    for name, param in tracked(params.items(), "initial weights", total, lambda p: p[1].numel(), bytes=False):
        fill(made.tensors[name], made.boxes[name], initialize, param, made.scales)
