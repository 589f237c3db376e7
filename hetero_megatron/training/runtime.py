"""One rank of a plan, ready to train: the stage, its executor, gradient synchronisation and optimizer.

``train_step`` and ``evaluate`` address data by global sample index and return numbers that are equal on every
rank and, up to floating-point reassociation, equal for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.data.upload import UploadedBatches, Uploader
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, cut
from hetero_megatron.model import GPTStage, StagePart
from hetero_megatron.model.attention import Attention
from hetero_megatron.model.gpt import MLP
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear, Router, SharedGate
from hetero_megatron.ops import KernelPlan, default_kernels
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.ops.linear_cross_entropy import KnownLoss
from hetero_megatron.ops.tile_kernels import tile_kernel
from hetero_megatron.parallel.balance import LoadBalance, StepRouting
from hetero_megatron.parallel.compile import apply_compile
from hetero_megatron.parallel.context import apply_context_parallel
from hetero_megatron.parallel.device_graphs import LayerGraphs
from hetero_megatron.parallel.dora import RowNorms
from hetero_megatron.parallel.experts import apply_expert_parallel
from hetero_megatron.parallel.gradients import GradientSync
from hetero_megatron.parallel.int8_base import fill, store_in_int8
from hetero_megatron.parallel.long_loss import in_chunks, loss_chunk, vocab_loss
from hetero_megatron.parallel.lora import apply_lora
from hetero_megatron.parallel.optimizer import ShardedOptimizer, squared_norm
from hetero_megatron.parallel.recompute import apply_recompute
from hetero_megatron.parallel.tensor import RowParallelLinear, apply_tensor_parallel
from hetero_megatron.parallel.update import OptimizerFactory
from hetero_megatron.parallel.vocab import vocab_parallel_cross_entropy
from hetero_megatron.pipeline import PipelineExecutor
from hetero_megatron.pipeline.boundary import Boundary
from hetero_megatron.pipeline.executor import StageChunk, StageWork, StepResult, TimedAction
from hetero_megatron.plan import (
    locate,
    micro_batch_sizes,
    pipeline_samples,
    stage_at,
    unit_at,
    unit_sequences,
)
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.plan.context_plan import stage_contexts
from hetero_megatron.plan.experts import rank_shares, require_rows
from hetero_megatron.plan.fp8 import Fp8
from hetero_megatron.plan.fp8_checks import stage_fp8
from hetero_megatron.platform.scalars import ScalarReader
from hetero_megatron.progress import tracked
from hetero_megatron.schedule import Action, receive_order
from hetero_megatron.spec import Dropout, LogicalTensor, logical_tensors, stage_tensors, tensor_box
from hetero_megatron.spec.balance import UNBALANCED, Balancing
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.spec.flops import LOGITS_BYTES

Fetch = Callable[[Sequence[int]], Batch]  # global sample indices -> batch on the CPU
Initialize = Callable[[LogicalTensor, Box], torch.Tensor]  # values of a box of a logical tensor
_BACKWARD = {"B", "B_INPUT", "W", "SEND_B", "RECV_B", "REDUCE"}


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, equal on all ranks.

    Attributes:
        loss: mean over all tokens that count; tokens: how many they were.
        grad_norm: of the whole model's gradient of that mean, before clipping.
        skipped: the step was not taken because the gradient was not finite.
        stop: some rank asked to stop.
        routing: of a mixture of experts.
        busy, bubble, communication: seconds per rank of the plan (forward and backward; the update is not in them).
        actions: what this rank did, and when.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool
    stop: bool
    busy: list[float]
    bubble: list[float]
    communication: list[float]
    actions: Sequence[TimedAction] = ()
    routing: StepRouting | None = None


class Runtime:
    """Built alike on every rank of the plan; see the module docstring.

    Args:
        compiled: its groups have been created, on all ranks of the job.
        dtype: of parameters and activations (fp64, fp32, bf16, fp16).
        initialize: initial values by logical tensor and box.
        optimizer: makes the optimizer; None for evaluation only.
        kernels: of this rank's stage; None: without plugins, as the plan's stage wishes.
        compile_backend: of torch.compile, for the layers; None: they run as they are.
        logits_bytes: where the logits of a micro-batch would be more, head and loss go through its tokens in chunks.
        balancing: of experts, where the model has some.
        fp8: of the kernels that are made where none are given.
        dropout: in training; seed: of its masks.
        graphs_after: steps after which layers run as device graphs (``cli/graph_flags.py`` says where they can); None:
            they never do.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        comm: Comm,
        dtype: torch.dtype,
        initialize: Initialize,
        optimizer: OptimizerFactory | None,
        kernels: KernelPlan | None = None,
        compile_backend: str | None = None,
        logits_bytes: int = LOGITS_BYTES,
        balancing: Balancing = UNBALANCED,
        fp8: Fp8 | None = None,
        dropout: Dropout = NO_DROPOUT,
        seed: int = 0,
        graphs_after: int | None = None,
    ) -> None:
        plan, spec = compiled.plan, compiled.spec
        self.compiled, self.plan, self.spec, self.comm, self.dtype = compiled, plan, spec, comm, dtype
        self.dropout, self.seed = dropout, seed
        self.place = locate(plan, comm.rank)
        self.stage, self.unit = stage_at(plan, self.place), unit_at(plan, self.place)
        self.share = rank_shares(spec, self.stage)[comm.rank]
        chunk = loss_chunk(self.stage, self.place.unit, spec, dtype, logits_bytes)
        contexts = stage_contexts(spec, self.stage, plan.seq_length)
        self.context = next((c for c in contexts if comm.rank in c.ranks), None)
        self.kernels = kernels or default_kernels(
            spec, self.share, self.stage.head, dtype, comm.device, self.unit.tp, dict(self.stage.kernels),
            f"pipelines[{self.place.pipeline}].stages[{self.place.stage}].kernels", compile_backend is not None,
            chunk is not None, bool(contexts), stage_fp8(self.stage, fp8), dropout,
        )  # fmt: skip
        self.world, self.tp_group = comm.group(plan.ranks), comm.group(self.unit.ranks)
        self.scales: dict[str, torch.Tensor] = {}  # of frozen weights in 8 bits, by logical name
        self.row_norms: RowNorms | None = None
        self.model, self.boxes = self._build_model(initialize)
        self.balance = LoadBalance(self.model, plan, spec, balancing, comm) if spec.moe is not None else None
        if compile_backend is not None:
            apply_compile(self.model, compile_backend)
        self.loss_chunk = chunk
        self.head_loss = self._head_loss()
        if self.head_loss is not None:  # it applies the head itself
            self.model.lm_head.forward = lambda x: x  # type: ignore[method-assign]
        accelerator = comm.accelerator
        self.uploader = Uploader(accelerator, comm.device) if accelerator is not None else None
        self.reader = ScalarReader(accelerator)
        self.executor = self._build_executor()
        self._schedules: dict[tuple[int, bool], tuple[tuple[Action, ...], tuple[Action, ...]]] = {}
        self._boundaries: dict[tuple[int, int], Boundary] = {}
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.sync = GradientSync(comm, params, self.boxes, compiled.buckets, self._chunk_names())
        if compile_backend is None:
            self.sync.take_products(self._products(), self.kernels.weight_gradients)
        if self.head_loss is not None and self.model.lm_head.matrix.requires_grad:
            again = spec.tied and self.stage.embed
            self.sync.take_ahead(self.model.lm_head.matrix, self.kernels.weight_gradients, again)
        self.graphs: LayerGraphs | None = None
        self.eager_steps = 0 if graphs_after is None else graphs_after  # still to come, before layers run as graphs
        if graphs_after is not None:
            assert accelerator is not None, "there are no graphs of a processor"
            self.graphs = LayerGraphs(self.model, self.stage.chunks, accelerator, self.sync)
        offload = self.stage.optimizer.offload
        apart = [t.name for t in logical_tensors(spec) if t.by_load]
        self.optimizer = ShardedOptimizer(self.sync, optimizer, offload, apart) if optimizer is not None else None
        self.before_update: Callable[[], None] = lambda: None  # waits for whoever still reads weights or moments

    def _build_model(self, initialize: Initialize) -> tuple[GPTStage, dict[str, Box]]:
        stage, spec = self.stage, self.spec
        held = {t.name: t for t in stage_tensors(spec, stage.layer_indices(), stage.embed, stage.head)}
        model = GPTStage(
            spec, self.share, stage.layer_indices(), stage.embed, stage.head, dtype=self.dtype,
            device=self.comm.device, kernels=self.kernels, seq_length=self.plan.seq_length, dropout=self.dropout,
            store=partial(store_in_int8, held, self.scales),
        )  # fmt: skip
        boxes = {name: tensor_box(tensor, self.share) for name, tensor in held.items()}
        if spec.lora is not None:
            apply_lora(model, spec.lora, boxes, self.dtype, self.comm.device)
            if spec.lora.dora:
                self.row_norms = RowNorms(model, held, spec.lora.scale, self.tp_group)
        params = dict(model.named_parameters())
        assert params.keys() == held.keys(), f"model and spec disagree: {params.keys() ^ held.keys()}"
        with torch.no_grad():
            total = sum(param.numel() for param in params.values())
            for name, param in tracked(params.items(), "initial weights", total, lambda p: p[1].numel(), bytes=False):
                fill(held[name], boxes[name], initialize, param, self.scales)
        shards = tuple(b - a for a, b in cut(self.unit.num_tokens, [1] * self.unit.tp))
        heads = [rank_shares(spec, stage)[rank].kv_heads for rank in self.unit.ranks]
        apply_tensor_parallel(model, self.tp_group, shards, self.share.vocab, heads)
        intervals = [torch.arange(a, b, device=self.comm.device) for a, b in self.unit.tokens or ((0, 0),)]
        model.token_numbers = torch.cat(intervals)
        if self.context is not None:
            kernel = tile_kernel(self.comm.device, self.kernels.choices["attention"].kernel, spec.attn_softcap)
            merge = self.kernels.choices["attn_merge"].kernel.forward
            apply_context_parallel(model, self.context, self.comm, kernel, merge)
        apply_expert_parallel(model, stage, self.comm, self.plan.islands)
        apply_recompute(model, stage.recompute)
        return model, boxes

    def _build_executor(self) -> PipelineExecutor:
        p, s = self.place.pipeline, self.place.stage
        pipeline = self.plan.pipelines[p]
        count = len(pipeline.stages)
        around = {s - 1, s + 1} if pipeline.chunks == 1 else {(s - 1) % count, (s + 1) % count}
        self.comm.connect(r for i in sorted(around - {-1, s, count}) for r in pipeline.stages[i].ranks)
        chunks = [self._chunk(c) for c in range(pipeline.chunks)]
        place = f"pipeline {p} stage {s}"
        return PipelineExecutor(self.comm, chunks, self.dtype, place, self.kernels.weight_gradients)

    def _chunk(self, number: int) -> StageChunk:
        stages, s = self.plan.pipelines[self.place.pipeline].stages, self.place.stage
        alone, final = len(stages) == 1, number + 1 == len(self.stage.chunks)
        first, last = s == 0 and number == 0, s + 1 == len(stages) and final
        part = StagePart(range(*self.stage.chunks[number]), self.stage.embed and number == 0, self.stage.head and final)
        return StageChunk(
            self.model if len(self.stage.chunks) == 1 else partial(self.model, part=part),
            self._loss if part.head else None,
            None if first or alone else partial(self._boundary, (s - 1) % len(stages)),
            None if last or alone else partial(self._boundary, s),
            number if s > 0 else number - 1,
            alone and not first,
            alone and not last,
        )

    def _chunk_names(self) -> list[list[str]]:
        """Trained parameters of each chunk; the embedding of a tied head is in the chunk of either."""
        chunks = self.stage.chunks
        return [
            [t.name for t in stage_tensors(
                self.spec, range(a, b), self.stage.embed and c == 0, self.stage.head and c + 1 == len(chunks)
            ) if t.trained]
            for c, (a, b) in enumerate(chunks)
        ]  # fmt: skip

    def _products(self) -> Iterator[Sequence[torch.Tensor]]:
        """Trained weights that a forward uses once, each in a product, and those of one product together; a tied head's
        is the embedding's, too, where the stage has both."""
        kinds = (Linear, RowParallelLinear, GroupedLinear, Router, SharedGate)
        for module in self.model.modules():
            if isinstance(module, kinds) and module.weight.requires_grad:
                yield (module.weight,)
            if isinstance(module, (Attention, MLP)) and module.together[0].weight.requires_grad:
                yield [linear.weight for linear in module.together]
        if self.spec.lora is not None:
            return
        if self.stage.head and not (self.spec.tied and self.stage.embed) and self.head_loss is None:
            yield (self.model.lm_head.matrix,)

    def apart(self) -> dict[str, str]:
        """Operators whose kernels cannot be watched by wrapping the kernel plan's callables, and why."""
        found = {"adamw": "it changes its arguments in place"}
        if self.context is not None:
            found["attention"] = found["attn_merge"] = "context groups call its kernel tile by tile"
        if "vocab_cross_entropy" in self.kernels.choices:
            found["vocab_cross_entropy"] = "its forward and backward are called apart"
        if self.kernels.fp8 is not None:
            found[self.kernels.fp8] = "its scales come from several ranks"
        if self.head_loss is not None and "vocab_cross_entropy" in self.kernels.choices:
            found["gemm"] = "the head's is called chunk by chunk (that of the layers is seen)"
        return found

    def _boundary(self, upstream: int, size: int) -> Boundary:
        if (upstream, size) not in self._boundaries:
            moves = self.compiled.boundary(self.place.pipeline, upstream, size)
            self._boundaries[upstream, size] = Boundary(self.comm, moves)
        return self._boundaries[upstream, size]

    def _head_loss(self) -> KnownLoss | None:
        """Head and loss in one, where logits are never there as a whole."""
        kernels, choices = self.kernels, self.kernels.choices
        if "linear_cross_entropy" in choices:
            return kernels.linear_cross_entropy  # type: ignore[no-any-return]
        if self.loss_chunk is None:
            return None
        assert "vocab_cross_entropy" in choices, "a plan for other logits_bytes"
        return vocab_loss(
            kernels.weight_gradients, self.tp_group, self.share.vocab, kernels.vocab_cross_entropy,
            choices["gemm"].kernel, self.spec.logit_softcap,
        )  # fmt: skip

    def _loss(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        """Sum of token losses from logits, or from the head's input; ``seed``: its gradient in backward."""
        losses = self._token_losses(out, batch, seed)
        return losses.sum() if batch.loss_mask is None else (losses * batch.loss_mask).sum()

    def _token_losses(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        group, vocab, kernels, labels = self.tp_group, self.share.vocab, self.kernels, batch.labels
        if self.head_loss is not None:
            dloss = None
            if torch.is_grad_enabled():
                wide = torch.promote_types(out.dtype, torch.float32)
                dloss = torch.full(labels.shape, seed, dtype=wide, device=labels.device)
                dloss = dloss if batch.loss_mask is None else dloss * batch.loss_mask
            chunk = labels.numel() if self.loss_chunk is None else self.loss_chunk
            return in_chunks(self.head_loss, max(chunk, 1), out, self.model.lm_head.matrix, labels, dloss)
        if group.size > 1:
            return vocab_parallel_cross_entropy(out, labels, group, vocab, kernels.vocab_cross_entropy)
        return kernels.cross_entropy(out, labels)  # type: ignore[no-any-return]

    def work(
        self, fetch: Fetch, first_sample: int, batch_size: int, forward_only: bool = False, step: int = 0
    ) -> StageWork:
        """What this rank does for the global samples ``[first_sample, first_sample + batch_size)``.

        Args:
            forward_only: for evaluation: there is no dropout.
            step: number of the optimizer step, which dropout depends on.
        """
        if self.row_norms is not None:
            self.row_norms.refresh()
        sizes, rows = self.samples(first_sample, batch_size)
        tokens = self.unit.tokens
        adapters = self.spec.lora is not None and self.spec.lora.dropout > 0
        dropped = not forward_only and (self.dropout != NO_DROPOUT or adapters)
        draws = partial(Draws, self.seed) if self.graphs is None else partial(self.graphs.draws, self.seed)
        make = [
            partial(_selected, fetch, indices, tokens, draws(step, indices[0]) if dropped else None)
            if indices else None
            for indices in rows
        ]  # fmt: skip
        batches: Sequence[Batch | None]
        if self.uploader is None:
            batches = [None if each is None else each() for each in make]
        else:
            batches = UploadedBatches(make, self.uploader)
        actions, receives = self._actions(batch_size, forward_only)
        return StageWork(actions, batches, sizes, receives)

    def samples(self, first_sample: int, batch_size: int) -> tuple[tuple[int, ...], list[range]]:
        """(sequences of each micro-batch, the global sample indices of this rank's rows of it)."""
        p = self.place.pipeline
        start, stop = pipeline_samples(self.plan, batch_size)[p]
        sizes = micro_batch_sizes(self.plan.pipelines[p], stop - start)
        rows = []
        for size in sizes:
            a, b = unit_sequences(self.stage, size)[self.place.unit]
            rows.append(range(first_sample + start + a, first_sample + start + b))
            start += size
        return sizes, rows

    def _actions(self, batch_size: int, forward_only: bool) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """This stage's actions up to the update, and its receives in the order of posting; a schedule is validated
        before it first runs."""
        key = (batch_size, forward_only)
        if key not in self._schedules:
            require_rows(self.plan, batch_size)
            schedule = self.compiled.schedules(batch_size)[self.place.pipeline]
            left_out = {"UPDATE", "SPREAD"} | (_BACKWARD if forward_only else set())
            rows = schedule.stages[self.place.stage], receive_order(schedule, self.place.stage)
            self._schedules[key] = tuple(tuple(a for a in row if a.kind not in left_out) for row in rows)  # type: ignore[assignment]
        return self._schedules[key]

    def train_step(
        self,
        fetch: Fetch,
        first_sample: int,
        batch_size: int,
        lr: float,
        weight_decay: float = 0.0,
        clip_grad: float = 0.0,
        loss_scale: float = 1.0,
        stop: bool = False,
        veto: Callable[[torch.Tensor, float, float], bool] | None = None,
        step: int = 0,
    ) -> StepStats:
        """Optimizer step number ``step``; ``clip_grad`` 0 means no clipping; ``stop`` is told to all ranks.

        ``veto`` is asked before the weights change, with the same values on all ranks: (loss sum, tokens and squared
        norm of each rank [ranks, 3], loss, norm); True: the step is not taken.
        """
        rates = (lr, weight_decay, clip_grad, loss_scale)
        with self.comm.clock.counting():
            if self.graphs is not None:
                self.graphs.warmed_up = self.eager_steps == 0
                self.eager_steps = max(self.eager_steps - 1, 0)
            # Seeding with the nominal token count keeps 16-bit gradients in range; the true count is applied later.
            work = self.work(fetch, first_sample, batch_size, step=step)
            work = replace(work, seed=loss_scale / (batch_size * self.plan.seq_length))
            return self._train_step(work, first_sample, batch_size, rates, stop, veto)

    def _train_step(
        self,
        work: StageWork,
        first_sample: int,
        batch_size: int,
        rates: tuple[float, float, float, float],
        stop: bool,
        veto: Callable[[torch.Tensor, float, float], bool] | None,
    ) -> StepStats:
        lr, weight_decay, clip_grad, loss_scale = rates
        assert self.optimizer is not None
        nominal = batch_size * self.plan.seq_length
        if self.balance is not None:
            self.balance.begin(work.seed)
        result = self.executor.run(work, self.sync)
        self.comm.activity = "gradient synchronisation"
        grads = self.sync.finish()
        every = self.gather(result, squared_norm(grads, self.kernels.l2norm), stop)
        loss_sum, tokens, square, stops = every[:, :4].sum(0).tolist()
        if tokens == 0:
            raise UserError(f"no token of samples {first_sample}..{first_sample + batch_size - 1} counts in the loss")
        scale = nominal / tokens / loss_scale
        norm = math.sqrt(square) * scale if math.isfinite(square) else math.inf
        vetoed = veto is not None and veto(every[:, :3], loss_sum / tokens, norm)
        skipped = vetoed or not math.isfinite(norm)
        routing = self.balance.routing(every[:, 7:], tokens) if self.balance is not None else None
        if not skipped:
            clip = min(1.0, clip_grad / (norm + 1e-6)) if clip_grad > 0 else 1.0
            self.before_update()
            self.comm.activity = "the optimizer step"
            if self.balance is not None and routing is not None:
                self.balance.move_bias(self.optimizer.owned(), routing)
            self.optimizer.set_rates(lr, weight_decay)
            self.optimizer.step(grads, scale * clip)
        busy, bubble, communication = every[:, 4:7].T.tolist()
        mean, stops = loss_sum / tokens, bool(stops)
        return StepStats(mean, int(tokens), norm, skipped, stops, busy, bubble, communication, result.actions, routing)

    @torch.no_grad()
    def evaluate(self, fetch: Fetch, first_sample: int, batch_size: int) -> tuple[float, int]:
        """(sum of token losses, tokens) of some samples, equal on all ranks."""
        with self.comm.clock.counting():
            result = self.executor.run(self.work(fetch, first_sample, batch_size, forward_only=True))
            loss_sum, tokens = self.gather(result, 0.0)[:, :2].sum(0).tolist()
        return loss_sum, int(tokens)

    def gather(self, result: StepResult, square: float | torch.Tensor, stop: bool = False) -> torch.Tensor:
        """One row per rank, fp64: loss sum, tokens, squared norm, stop, three kinds of seconds, ``LoadBalance.row``. A
        TP group counts its loss once."""
        counts = self.place.tp_rank == 0
        balance = [self.balance.row()] if self.balance is not None else []
        loss_sum, square, *routed = self.reader.read(result.loss_sum, square, *balance)  # the only wait for a device
        result.read(self.comm.clock)
        row = [loss_sum * counts, result.tokens * counts, square, float(stop)]
        seconds = [result.busy_seconds, result.bubble_seconds, result.communication_seconds]
        return self.world.gather_vectors(torch.tensor(row + seconds + routed, dtype=torch.float64))


def _selected(
    fetch: Fetch, indices: Sequence[int], tokens: Sequence[tuple[int, int]], draws: Draws | None
) -> Batch:
    return replace(fetch(indices).select(tokens), draws=draws)
