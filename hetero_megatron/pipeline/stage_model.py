"""What one rank of a stage is: its place and shares, its model with parallelism applied from outside, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box, cut
from hetero_megatron.model import GPTStage
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear, Router, SharedGate
from hetero_megatron.ops import KernelPlan, default_kernels
from hetero_megatron.ops.linear_cross_entropy import KnownLoss
from hetero_megatron.parallel.empty_stage import EmptyStage, empty_stage, fill, owned_values
from hetero_megatron.parallel.grad_sync.routes import OwnedPiece
from hetero_megatron.parallel.recompute import apply_recompute
from hetero_megatron.parallel.tensor import RowParallelLinear, apply_tensor_parallel
from hetero_megatron.parallel.vocab import in_chunks, loss_chunk, vocab_loss, vocab_parallel_cross_entropy
from hetero_megatron.plans import Plan, locate, stage_at, unit_at
from hetero_megatron.plans.context_plan import stage_contexts
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import stage_fp8
from hetero_megatron.plans.shares import has_context, rank_shares
from hetero_megatron.spec import Dropout, LogicalTensor, ModelSpec, stage_tensors
from hetero_megatron.utils.text import tracked

if TYPE_CHECKING:
    from hetero_megatron.parallel.dora import RowNorms
    from hetero_megatron.parallel.host_memory import HostRows
    from hetero_megatron.parallel.offload import OffloadedActivations

class RankStage:
    """A rank's stage: what its kernels, its model and its steps are made from.

    Attributes:
        place: indices of its pipeline, stage and unit, and its rank in the unit's TP group.
        stage, unit: the plan's.
        share: of each layer and of the vocabulary, that this rank holds.
        context: its context group; None: it has whole sequences, or no attention.
        tiled: the stage has context groups, so that its attention merges partial results.
        path: of the stage in a plan file, for refusals.
    """

    def __init__(self, plan: Plan, spec: ModelSpec, rank: int) -> None:
        self.plan, self.spec, self.rank = plan, spec, rank
        self.place = locate(plan, rank)
        self.stage, self.unit = stage_at(plan, self.place), unit_at(plan, self.place)
        self.share = rank_shares(spec, self.stage)[rank]
        self.tiled, self.context = has_context(self.stage, plan.seq_length), None
        if self.tiled:
            contexts = stage_contexts(spec, self.stage, plan.seq_length)
            self.context = next((c for c in contexts if rank in c.ranks), None)
        self.path = f"pipelines[{self.place.pipeline}].stages[{self.place.stage}]"

    def fp8(self, default: Fp8 | None) -> Fp8 | None:
        """What its linear modules compute in, ``default`` where the stage does not say; None: in the weights' dtype."""
        return stage_fp8(self.stage, default) if default is not None and self.stage.num_layers else None

    def loss_chunk(self, dtype: torch.dtype, logits_bytes: int) -> int | None:
        """Tokens of a micro-batch whose logits exist at once; None: those of all, or no head."""
        return loss_chunk(self.stage, self.place.unit, self.spec, dtype, logits_bytes) if self.stage.head else None

    def kernels(
        self, dtype: torch.dtype, device: torch.device, compiled: bool, logits_bytes: int, fp8: Fp8 | None,
        dropout: Dropout,
    ) -> KernelPlan:  # fmt: skip
        """Those of torch, as the plan's stage wishes; ``fp8``: of stages that say nothing of it."""
        chunked = self.loss_chunk(dtype, logits_bytes) is not None
        in_fp8 = stage_fp8(self.stage, fp8) if fp8 is not None else None
        return default_kernels(
            self.spec, self.share, self.stage.head, dtype, device, self.unit.tp, dict(self.stage.kernels),
            f"{self.path}.kernels", compiled, chunked, self.tiled, in_fp8, dropout,
        )  # fmt: skip


# (logical tensor, box) -> its values there, of the box's shape, in any dtype, in host memory
Initialize = Callable[[LogicalTensor, Box], torch.Tensor]


class StageModel:
    """Built alike on every rank of the stage.

    Args:
        here: the stage; dtype: of parameters and activations.
        kernels: of this rank.
        initialize: initial values, of every tensor of the stage in turn.
        dropout: in training.
        divided: logical names of weights that are to have neither memory nor values of their own.

    Attributes:
        module: maps tokens [b, s] or a stage's input [b, s, h] to hidden states or logits.
        boxes: of each parameter in its logical tensor, by logical name.
        scales: of frozen weights in few bits, by logical name.
        adapters: turns them off; None: the model has none.
        row_norms: of a model with DoRA; to be refreshed before every step.
        offloaded: activations, of a stage that has some in host memory.
        rows: of the weights, of a stage that divides them and has its optimizer in host memory.
    """

    def __init__(
        self,
        here: RankStage,
        comm: Comm,
        dtype: torch.dtype,
        kernels: KernelPlan,
        initialize: Initialize,
        dropout: Dropout,
        divided: Collection[str] = (),
        narrow_tp_sums: bool = False,
    ) -> None:
        self.here, self.comm, self.dtype, self.kernels = here, comm, dtype, kernels
        self._narrow_tp_sums = narrow_tp_sums
        stage, spec = here.stage, here.spec
        empty = empty_stage(
            spec, stage, here.share, dtype, comm.device, kernels, here.plan.seq_length, dropout, divided
        )
        self.module, self.boxes, self.scales, self.adapters = empty.module, empty.boxes, empty.scales, empty.adapters
        self._empty, self._initialize = empty, initialize
        self.row_norms: RowNorms | None = None
        if spec.lora is not None and spec.lora.dora:
            from hetero_megatron.parallel.dora import RowNorms

            self.row_norms = RowNorms(self.module, empty.tensors, spec, stage, comm)
        _fill(empty, initialize, divided)
        self._divide()
        self.rows: HostRows | None = None
        self.offloaded: OffloadedActivations | None = None
        keeps_rows = stage.weights is not None and stage.optimizer.offload
        if keeps_rows or stage.activations is not None:
            from hetero_megatron.parallel.host_memory import HostLink, HostRows

            link = HostLink(comm)
            self.rows = HostRows(link) if keeps_rows else None
        if stage.activations is not None:
            from hetero_megatron.parallel.offload import OffloadedActivations

            self.offloaded = OffloadedActivations(self.module, stage.activations, comm.device, link)
            apply_recompute(self.module, stage.recompute, self.offloaded.keep)
            self.offloaded.apply()
        elif stage.recompute.kind != "none":
            apply_recompute(self.module, stage.recompute)

    def _divide(self) -> None:
        """Tensor, context and expert parallelism, around the layers."""
        rank_stage, comm, model = self.here, self.comm, self.module
        unit, stage = rank_stage.unit, rank_stage.stage
        shards = tuple(b - a for a, b in cut(unit.num_tokens, [1] * unit.tp))
        if unit.tp > 1:
            heads = [rank_shares(rank_stage.spec, stage)[rank].kv_heads for rank in unit.ranks]
            group = replace(comm.group(unit.ranks), narrow_sums=self._narrow_tp_sums)
            apply_tensor_parallel(model, group, shards, rank_stage.share.vocab, heads)
        intervals = [torch.arange(a, b, device=comm.device) for a, b in unit.tokens or ((0, 0),)]
        model.token_numbers = torch.cat(intervals)
        if rank_stage.context is not None:
            from hetero_megatron.ops.tile_kernels import tile_kernel
            from hetero_megatron.parallel.context import apply_context_parallel

            choices = self.kernels.choices
            kernel = tile_kernel(comm.device, choices["attention"].kernel, rank_stage.spec.attn_softcap)
            apply_context_parallel(model, rank_stage.context, comm, kernel, choices["attn_merge"].kernel.forward)
        if rank_stage.spec.moe is not None:
            from hetero_megatron.parallel.experts import apply_expert_parallel

            apply_expert_parallel(model, stage, comm, rank_stage.plan.islands)

    @property
    def stored_boxes(self) -> dict[str, Box]:
        """Of each parameter, in the array that memory has of it: :attr:`boxes`, but of those in 4 bits the bytes."""
        return self._empty.stored_boxes()

    @torch.no_grad()
    def owned_values(self, names: Sequence[str], pieces: Sequence[OwnedPiece]) -> list[torch.Tensor]:
        """Initial values of pieces of divided weights, in their dtype, on the rank's device; of those in 8 bits all
        scales are written. ``names``: of the weights, in the order of their pieces. Each has its
        piece's shape, [rows, columns]."""
        values = list[torch.Tensor]()
        for name in names:
            tensor, parameter = self._empty.tensors[name], self.module.get_parameter(name)
            boxes = [piece.box for piece in pieces if piece.name == name]
            values += owned_values(tensor, self.boxes[name], boxes, self._initialize, parameter, self.scales)
        return values

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
        """Trained weights that a forward uses once, each in a product, and those of one product together; a tied
        head's is the embedding's, too, where the stage has both; [outputs, inputs] each.

        Args:
            head: whether the model applies the head, and not the loss.
        """
        kinds = (Linear, RowParallelLinear, GroupedLinear, Router, SharedGate)
        for module in self.module.modules():
            if isinstance(module, kinds) and module.weight.requires_grad:
                yield (module.weight,)
            joint_linears: Sequence[Linear] = getattr(module, "together", ())
            if joint_linears and joint_linears[0].weight.requires_grad:
                yield [linear.weight for linear in joint_linears]
        spec, stage = self.here.spec, self.here.stage
        if head and stage.head and spec.lora is None and not (spec.tied and (stage.embed or spec.mtp_layers)):
            yield (self.module.lm_head.matrix,)


@torch.no_grad()
def _fill(empty: EmptyStage, initialize: Initialize, divided: Collection[str]) -> None:
    params = {name: param for name, param in empty.parameters().items() if name not in divided}
    total = sum(param.numel() for param in params.values())
    for name, param in tracked(params.items(), "initial weights", total, lambda p: p[1].numel(), bytes=False):
        fill(empty.tensors[name], empty.boxes[name], initialize, param, empty.scales)


class StageLoss:
    """The loss of a stage, with or without a head; it may take over what the head does (``Head.in_loss``).

    Args:
        group: the unit's ranks.
        chunk: see :meth:`RankStage.loss_chunk`; kept.

    Attributes:
        head: head and loss in one, where logits never exist as a whole; None: the model applies the head.
    """

    def __init__(
        self, here: RankStage, model: GPTStage, kernels: KernelPlan, group: Group, chunk: int | None
    ) -> None:
        self._model, self._kernels, self._group, self.chunk = model, kernels, group, chunk
        self._vocab, self._factor = here.share.vocab, here.spec.mtp_loss_factor
        self.head: KnownLoss | None = None
        if "linear_cross_entropy" in kernels.choices:
            self.head = kernels.linear_cross_entropy
        elif chunk is not None:
            assert "vocab_cross_entropy" in kernels.choices, "a plan for other logits_bytes"
            self.head = vocab_loss(
                kernels.weight_gradients, group, self._vocab, kernels.vocab_cross_entropy,
                kernels.choices["gemm"].kernel, here.spec.logit_softcap,
            )  # fmt: skip
        if self.head is not None:
            model.lm_head.in_loss = True

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Sum of the losses of tokens that count: a tensor [], in at least fp32. Of a batch with targets further ahead
        [1 + modules]: that sum, and that of each module, whose gradient has the weight of its loss.

        Args:
            out: logits [b, s, V_local], or the head's input [b, s, h] where ``head`` is not None; with targets further
                ahead of (1 + modules) b rows.
            seed: gradient of the sum with which backward will start.
        """
        if batch.ahead:
            return self._with_predictions(out, batch, seed)
        mask = batch.loss_mask
        losses = self.losses(out, batch, 1.0 if mask is None else mask, seed)
        return losses.sum() if mask is None else (losses * mask).sum()

    def _with_predictions(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        from hetero_megatron.data.batch import with_targets_ahead

        all_targets, depth, factor = with_targets_ahead(batch), len(batch.ahead), self._factor / len(batch.ahead)
        assert all_targets.loss_mask is not None
        rows = len(batch.labels)
        wide_dtype = torch.promote_types(out.dtype, torch.float32)
        weights = all_targets.loss_mask.to(wide_dtype)  # without a copy from the host, for which it would wait
        weights[rows:] *= factor
        losses = self.losses(out, all_targets, weights, seed)
        weighted = (losses * weights).unflatten(0, (1 + depth, rows)).sum((1, 2))
        unweighted = (losses.detach() * all_targets.loss_mask).unflatten(0, (1 + depth, rows)).sum((1, 2))
        return unweighted + (weighted - weighted.detach())

    def count(self, batch: Batch) -> int:
        """Tokens of a batch that count."""
        return batch.num_loss_tokens()

    def losses(
        self, out: torch.Tensor, batch: Batch, weights: torch.Tensor | float | None = None, seed: float = 1.0,
        unweighted: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Of each token of a batch, [b, s], in at least fp32.

        Args:
            out: see :meth:`__call__`.
            weights: with which the losses will be added up, [b, s] or one for all, and ``seed`` the gradient of their
                sum; None: not known yet, so where head and loss are one, the losses have no gradient.
            unweighted: what this gave without weights, with its gradient where it has one.
        """
        kernels, labels = self._kernels, batch.labels
        if self.head is not None:
            dloss = None
            if torch.is_grad_enabled() and weights is not None:
                wide_dtype = torch.promote_types(out.dtype, torch.float32)
                dloss = torch.full(labels.shape, seed, dtype=wide_dtype, device=labels.device)
                dloss = dloss if isinstance(weights, float) else dloss * weights
            chunk = labels.numel() if self.chunk is None else self.chunk
            head = self._model.lm_head
            with torch.set_grad_enabled(dloss is not None):
                return in_chunks(self.head, max(chunk, 1), out, head.matrix, labels, dloss, head.bias)
        if unweighted is not None:
            return unweighted
        if self._group.size > 1:
            return vocab_parallel_cross_entropy(out, labels, self._group, self._vocab, kernels.vocab_cross_entropy)
        return kernels.cross_entropy(out, labels)  # type: ignore[no-any-return]
