"""One rank of a plan, ready to train: the stage, its executor, gradient synchronisation and optimizer.

``train_step`` and ``evaluate`` address data by global sample index and return numbers that are equal on every
rank and, up to floating-point reassociation, equal for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.ops import KernelPlan, default_kernels
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.parallel.divided_weights import DividedWeights, apply_divided_weights
from hetero_megatron.parallel.grad_sync.gradients import GradientSync
from hetero_megatron.parallel.optimizer import OptimizerFactory, ShardedOptimizer, owned_norm, scales_and_norms
from hetero_megatron.pipeline.stage_model import Initialize, RankStage, StageLoss, StageModel
from hetero_megatron.pipeline.stage_work import StageWork, StepResult, TimedAction
from hetero_megatron.pipeline.step_work import Fetch, StepWork, build_executor
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.experts import sequence_group
from hetero_megatron.plans.fp8_checks import stage_fp8
from hetero_megatron.platform.scalars import ScalarReader
from hetero_megatron.spec import logical_tensors
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.spec.preference import REWARDS
from hetero_megatron.training.runtime_options import PLAIN, RuntimeOptions, require_plain

if TYPE_CHECKING:
    from hetero_megatron.parallel.balance import LoadBalance, StepRouting
    from hetero_megatron.parallel.device_graphs import LayerGraphs
    from hetero_megatron.parallel.outer_steps import OuterSteps
    from hetero_megatron.pipeline.preference import PairLoss

OwnedGradients = list[list[torch.Tensor]]  # per bucket and owned piece, in at least fp32
# (loss sum, tokens and squared norm of each rank: fp64 [ranks, 3]; loss; norm) -> whether the step is not to be taken
Veto = Callable[[torch.Tensor, float, float], bool]


@dataclass(frozen=True)
class StepStats:
    """One optimizer step; equal on all ranks, but for ``actions``.

    Attributes:
        loss: mean over all tokens that count, in nats, or over all pairs; tokens: how many they were.
        grad_norm: of the whole model's gradient of that mean, before clipping; with outer steps, of the island where it
            is largest.
        skipped: the step was not taken: the gradient was not finite, or there was a veto.
        stop: some rank asked to stop.
        routing: of a mixture of experts.
        rewards: of preference pairs, means over them by TRL's names.
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
    rewards: Mapping[str, float] = field(default_factory=dict)


class Runtime:
    """Built alike on every rank of the plan; see the module docstring.

    Args:
        compiled: its groups have been created, on all ranks of the job.
        dtype: of parameters and activations (fp64, fp32, bf16, fp16).
        initialize: initial values by logical tensor and box.
        optimizer: makes the optimizer; None for evaluation only.
        kernels: of this rank's stage; None: without plugins, as the plan's stage wishes.

    Attributes:
        here: its place, stage and unit in the plan, of which ``place``, ``stage`` and ``unit`` are short names.
        world, tp_group: ranks of the plan; those of the unit.
        model, boxes, scales, row_norms: see :class:`StageModel`.
        balance: of a mixture of experts, else None.
        divided: weights, where the ranks of the stage divide them.
        offloaded: activations, where the stage has some in host memory.
        graphs: device graphs of the layers, where they are asked for.
        eager_steps: that are still to come before layers run as graphs.
        unwatched: context in which nothing is recorded of what the model does.
        outer: steps between islands, where the plan has them.
        pairs: the loss of preference pairs; None: the loss is that of tokens, or the stage has no head.
        before_update: called before weights change: waits for whoever still reads weights or moments.
        before_commit: called before all ranks hear of each other that their gradients are complete.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        comm: Comm,
        dtype: torch.dtype,
        initialize: Initialize,
        optimizer: OptimizerFactory | None,
        kernels: KernelPlan | None = None,
        options: RuntimeOptions = PLAIN,
    ) -> None:
        plan, spec = compiled.plan, compiled.spec
        self.compiled, self.plan, self.spec, self.comm, self.dtype = compiled, plan, spec, comm, dtype
        self.here, self.options = RankStage(plan, spec, comm.rank), options
        self.place, self.stage, self.unit = self.here.place, self.here.stage, self.here.unit
        self.loss_chunk = self.here.loss_chunk(dtype, options.logits_bytes)
        self.kernels = kernels or self._default_kernels()
        self.world, self.tp_group = comm.group(plan.ranks), comm.group(self.unit.ranks)
        # Where nothing is trained, divided weights stay whole.
        shared = [b for b in compiled.divided if comm.rank in b.ranks] if optimizer is not None else []
        built = StageModel(
            self.here, comm, dtype, self.kernels, initialize, options.dropout, {n for b in shared for n in b.names}
        )
        self.model, self.boxes, self.scales, self.row_norms = built.module, built.boxes, built.scales, built.row_norms
        self.balance: LoadBalance | None = None
        if spec.moe is not None:
            from hetero_megatron.parallel.balance import LoadBalance

            self.balance = LoadBalance(self.model, plan, spec, options.balancing, comm, dtype)
        if options.compile_backend is not None:
            from hetero_megatron.parallel.recompute import apply_compile

            apply_compile(self.model, options.compile_backend)
        self._adapters = built.adapters
        self.loss: StageLoss | PairLoss = StageLoss(
            self.here, self.model, self.kernels, self.tp_group, self.loss_chunk
        )
        self.pairs = self._pair_loss(self.loss)
        self.loss = self.pairs or self.loss
        self.reader = ScalarReader(comm.accelerator)
        weight_gradients = self.kernels.weight_gradients
        self.executor = build_executor(compiled, self.here, comm, self.model, self.loss, dtype, weight_gradients)
        if built.offloaded is not None:
            require_plain(options, f"{self.here.path}.activations", "activations cannot be in host memory", fp8=True)
        self.executor.activations = self.offloaded = built.offloaded
        self._step_work = StepWork(compiled, self.here, comm)
        self.sync = self._gradient_sync(built)
        self.graphs: LayerGraphs | None = None
        self.eager_steps = options.graphs_after or 0
        if options.graphs_after is not None:
            from hetero_megatron.parallel.device_graphs import LayerGraphs

            assert comm.accelerator is not None, "there are no graphs of a processor"
            self.graphs = LayerGraphs(self.model, self.stage.chunks, comm.accelerator, self.sync)
        by_load = [t.name for t in logical_tensors(spec) if t.by_load]
        offload = self.stage.optimizer.offload
        self.optimizer: ShardedOptimizer | None = None
        if optimizer is not None:
            self.optimizer = ShardedOptimizer(self.sync, optimizer, offload, by_load, built.owned_values)
        self.outer = self._outer_steps()
        self.divided = self._divided_weights(built)
        self.before_update: Callable[[], None] = lambda: None
        self.before_commit: Callable[[], None] = lambda: None
        self.unwatched: Callable[[], AbstractContextManager[object]] = nullcontext
        self._warm: dict[bool, frozenset[tuple[int, int]]] = {}

    def _default_kernels(self) -> KernelPlan:
        here, options = self.here, self.options
        return default_kernels(
            self.spec, here.share, self.stage.head, self.dtype, self.comm.device, self.unit.tp,
            dict(self.stage.kernels), f"{here.path}.kernels", options.compile_backend is not None,
            self.loss_chunk is not None, here.tiled, stage_fp8(self.stage, options.fp8), options.dropout,
        )  # fmt: skip

    def _pair_loss(self, tokens: StageLoss) -> PairLoss | None:
        """None: the loss is that of tokens, or the stage has no head."""
        if self.options.preference is None or not self.stage.head:
            return None
        from hetero_megatron.pipeline.preference import PairLoss

        ranks = sequence_group(self.stage, self.comm.rank)
        units = [unit for unit in self.stage.units if unit.sequences == self.unit.sequences]
        first = {unit.ranks[0] for unit in units}
        return PairLoss(
            self.options.preference, tokens, self.comm.group(ranks), [rank in first for rank in ranks],
            self.unit is units[0],
        )  # fmt: skip

    def _gradient_sync(self, built: StageModel) -> GradientSync:
        """Of the trained parameters; weights whose gradient is one product get it in place."""
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        sync = GradientSync(self.comm, params, self.boxes, self.compiled.buckets, built.chunk_names())
        gradients, head = self.kernels.weight_gradients, self.loss.head
        if self.options.compile_backend is None:
            sync.fuse_wgrad_accumulation(built.products(head=head is None), gradients)
        if head is not None and self.model.lm_head.matrix.requires_grad:
            sync.fuse_head_wgrad(self.model.lm_head.matrix, gradients, again=self.spec.tied and self.stage.embed)
        return sync

    def _divided_weights(self, built: StageModel) -> DividedWeights | None:
        """Of a stage that divides its weights; they have no memory before they are used, but where nothing is
        trained."""
        if self.stage.weights is None:
            return None
        require_plain(self.options, f"{self.here.path}.weights", "weights cannot be divided")
        buckets = [bucket for bucket in self.compiled.divided if self.comm.rank in bucket.ranks]
        params, sync = dict(self.model.named_parameters()), self.sync
        divided = DividedWeights(
            self.stage, self.spec.tied, buckets, params, sync.divided_sums, self.comm, self.boxes,
            self.kernels.weight_gradients,
        )  # fmt: skip
        apply_divided_weights(self.model, divided)
        self.executor.weights = divided
        if self.optimizer is not None:
            trained = {e.bucket.index: own for e, own in zip(sync.exchanges, self.optimizer.masters, strict=True)}
            divided.attach({
                bucket.index: trained[bucket.index] if bucket.trained
                else built.owned_values(bucket.names, divided.pieces[bucket.index]) for bucket in buckets
            })  # fmt: skip
        return divided

    def _outer_steps(self) -> OuterSteps | None:
        if self.plan.outer is None or self.optimizer is None:
            return None
        from hetero_megatron.parallel.outer_steps import OuterSteps

        return OuterSteps(self.compiled, self.comm, self.optimizer)

    def owned(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """(logical name, box, values) of the trained weights that this rank owns; with outer steps, of the global ones:
        all ranks together own each element once."""
        assert self.optimizer is not None
        return self.optimizer.owned() if self.outer is None else self.outer.owned()

    def global_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights that all islands agreed on last, where there are outer steps;
        called on all ranks."""
        if self.outer is None:
            return nullcontext()
        self.before_update()
        return self.outer.global_weights()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Context in which the model's parameters can be read; called on all ranks."""
        return self.divided.whole() if self.divided is not None else nullcontext()

    def apart(self) -> dict[str, str]:
        """Operators whose kernels cannot be watched by wrapping the kernel plan's callables, and why."""
        found = {"adamw": "it changes its arguments in place"}
        if self.here.context is not None:
            found["attention"] = found["attn_merge"] = "context groups call its kernel tile by tile"
        if "vocab_cross_entropy" in self.kernels.choices:
            found["vocab_cross_entropy"] = "its forward and backward are called apart"
        if self.kernels.fp8 is not None:
            found[self.kernels.fp8] = "its scales come from several ranks"
        if self.loss.head is not None and "vocab_cross_entropy" in self.kernels.choices:
            found["gemm"] = "the head's is called chunk by chunk (that of the layers is seen)"
        return found

    def use_schedules(self, compiled: CompiledPlan) -> None:
        """Go on with the schedules of a plan that has the same stages as this one."""
        self.compiled = compiled
        self._step_work.use_schedules(compiled)

    def work(
        self, fetch: Fetch, first_sample: int, batch_size: int, forward_only: bool = False, step: int = 0
    ) -> StageWork:
        """What this rank does for the global samples ``[first_sample, first_sample + batch_size)``.

        Args:
            forward_only: for evaluation: there is no dropout.
            step: number of the optimizer step, which dropout depends on.

        Raises:
            UserError: the plan has no schedule for a batch of this size.
        """
        if self.row_norms is not None:
            self.row_norms.refresh()
        adapters = self.spec.lora is not None and self.spec.lora.dropout > 0
        draws = None
        if not forward_only and (self.options.dropout != NO_DROPOUT or adapters):
            draws = partial(Draws if self.graphs is None else self.graphs.draws, self.options.seed, step)
        return self._step_work.make(fetch, first_sample, batch_size, forward_only, draws)

    def warm_up(
        self, fetch: Fetch, first_sample: int, batch_size: int, forward_only: bool = False, step: int = 0
    ) -> None:
        """Before the first step, and the first evaluation, and those whose micro-batches have other sizes in any
        pipeline: use all that it will use on devices once, with no message pending (see
        :meth:`PipelineExecutor.rehearse`). Called on all ranks; where no rank of the job has a device, it does nothing.
        Weights, random numbers and memory are as if it had not been.

        Args: of :meth:`work`.
        """
        if self.comm.islands is None or not self.comm.islands.has_devices:
            return
        known, sizes = self._warm.get(forward_only, frozenset()), self._step_work.sizes(batch_size)
        if sizes <= known:
            return
        self._warm[forward_only] = known | sizes
        if self.graphs is not None:
            self.graphs.warmed_up = False  # until the step begins
        accelerator = self.comm.accelerator
        random = accelerator.rng_state() if accelerator is not None else torch.get_rng_state()
        with self.unwatched(), self.pairs.rehearsal() if self.pairs is not None else nullcontext():
            self.executor.rehearse(self.work(fetch, first_sample, batch_size, forward_only, step))
            if not forward_only:
                self.sync.rehearsed()
        if accelerator is None:
            torch.set_rng_state(random)
            return
        accelerator.synchronize()
        accelerator.set_rng_state(random)
        if not known:
            accelerator.forget_peak_memory()

    def forward_backward(
        self, fetch: Fetch, first_sample: int, batch_size: int, loss_scale: float = 1.0, step: int = 0
    ) -> tuple[StepResult, OwnedGradients]:
        """Forward, backward and sums of gradients of step number ``step``; called on all ranks.

        Returns:
            this rank's losses and times, and the gradients that it owns: of the sum of token losses times
            ``loss_scale`` over the nominal number of tokens of the batch.
        """
        before = self.reference_in_step(fetch, first_sample, batch_size)
        work = self.work(fetch, first_sample, batch_size, step=step)
        # Seeding with the nominal count keeps 16-bit gradients in range; the true count is applied later.
        work = replace(work, seed=loss_scale / self.nominal(batch_size))
        if self.balance is not None:
            self.balance.begin(work.seed)
        result = self.executor.run(work, self.sync)
        result.before = before
        self.comm.activity = "gradient synchronisation"
        return result, self.sync.finish()

    def nominal(self, batch_size: int) -> int:
        """About how many losses the samples of a batch have: of tokens, or of pairs."""
        return batch_size * (self.plan.seq_length if self.options.preference is None else 1)

    def reference_in_step(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult | None:
        """A batch of pairs begins: compute the reference's log-probabilities of it, where that is done in each step;
        called on all ranks. None: it is not."""
        preference = self.options.preference
        if self.pairs is not None:
            self.pairs.begin()
        if preference is None or not (preference.refers and preference.in_step):
            return None
        return self.record_reference(fetch, first_sample, batch_size)

    @torch.no_grad()
    def record_reference(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult:
        """Compute log-probabilities of the answers of some global samples under the model as it is, without adapters;
        called on all ranks. They are in ``pairs.reference`` of the ranks with a head."""
        recording = self.pairs.record() if self.pairs is not None else nullcontext()
        adapters = self._adapters.off() if self._adapters is not None else nullcontext()
        with recording, adapters:
            result = self.executor.run(self.work(fetch, first_sample, batch_size, forward_only=True))
        self.reader.read()  # the clock is used again
        result.read(self.comm.clock)
        return result

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
        veto: Veto | None = None,
        step: int = 0,
    ) -> StepStats:
        """Take one optimizer step; called on all ranks, with equal arguments but for ``stop``.

        Args:
            fetch: gives the rows of the batch with these global sample indices.
            first_sample, batch_size: of the global batch, in sequences.
            clip_grad: largest norm of the gradient; 0: no clipping.
            loss_scale: factor on the loss in backward; gradients are divided by it.
            stop: told to all ranks.
            veto: asked before the weights change, with the same values on all ranks.
            step: its number, from 1, which dropout depends on.

        Raises:
            UserError: no token of the batch counts in the loss, or the plan has no schedule for its size.
            CommError: a peer is gone.
        """
        assert self.optimizer is not None
        with self.comm.clock.counting():
            self.warm_up(fetch, first_sample, batch_size, step=step)
            if self.graphs is not None:
                self.graphs.warmed_up = self.eager_steps == 0
                self.eager_steps = max(self.eager_steps - 1, 0)
            result, grads = self.forward_backward(fetch, first_sample, batch_size, loss_scale, step)
            self.before_commit()
            every = self.gather(result, owned_norm(grads, self.kernels.l2norm), stop)
            loss_sum, tokens, _, stops = every[:, :4].sum(0).tolist()
            islands = [every[at] for at in self.outer.places] if self.outer is not None else [every]
            apart = scales_and_norms(islands, self.nominal(batch_size) / loss_scale, first_sample, batch_size)
            loss, norm = loss_sum / tokens, max(norm for _, norm in apart)
            vetoed = veto is not None and veto(every[:, :3], loss, norm)
            skipped = vetoed or not math.isfinite(norm)
            routing = self.balance.routing(self._routed(every), tokens) if self.balance is not None else None
            rewards = self._rewards(every, tokens)
            if not skipped:
                scale, own = apart[self.outer.index if self.outer is not None else 0]
                clip = min(1.0, clip_grad / (own + 1e-6)) if clip_grad > 0 else 1.0
                if self.outer is not None:
                    self.outer.count([rows[:, 1].sum().item() for rows in islands])
                self._update(grads, scale * clip, lr, weight_decay, routing)
        busy, bubble, communication = every[:, 4:7].T.tolist()
        return StepStats(
            loss, int(tokens), norm, skipped, bool(stops), busy, bubble, communication, result.actions, routing, rewards
        )

    def _update(
        self, grads: OwnedGradients, scale: float, lr: float, weight_decay: float, routing: StepRouting | None
    ) -> None:
        assert self.optimizer is not None
        self.before_update()
        self.comm.activity = "the optimizer step"
        if self.balance is not None and routing is not None:
            self.balance.move_bias(self.optimizer.owned(), routing)
        self.optimizer.set_rates(lr, weight_decay)
        self.optimizer.step(grads, scale)

    @torch.no_grad()
    def evaluate(self, fetch: Fetch, first_sample: int, batch_size: int) -> tuple[float, int]:
        """Without dropout and gradients; called on all ranks.

        Returns:
            (sum of losses in nats, tokens that count or pairs) of the global samples ``[first_sample, first_sample +
            batch_size)``, equal on all ranks.
        """
        return self.evaluate_pairs(fetch, first_sample, batch_size)[:2]

    @torch.no_grad()
    def evaluate_pairs(
        self, fetch: Fetch, first_sample: int, batch_size: int
    ) -> tuple[float, int, Mapping[str, float]]:
        """The same, with the means over the pairs by TRL's names; none where the loss is that of tokens."""
        with self.comm.clock.counting():
            self.warm_up(fetch, first_sample, batch_size, forward_only=True)
            before = self.reference_in_step(fetch, first_sample, batch_size)
            result = self.executor.run(self.work(fetch, first_sample, batch_size, forward_only=True))
            result.before = before
            every = self.gather(result, 0.0)
            loss_sum, tokens = every[:, :2].sum(0).tolist()
        return loss_sum, int(tokens), self._rewards(every, tokens)

    def _routed(self, every: torch.Tensor) -> torch.Tensor:
        """Of what :meth:`gather` gives, the part of the experts."""
        return every[:, 7:] if self.options.preference is None else every[:, 7 : -len(REWARDS)]

    def _rewards(self, every: torch.Tensor, pairs: float) -> dict[str, float]:
        """Of what :meth:`gather` gives, the part of preference pairs, as means."""
        if self.options.preference is None:
            return {}
        means = (every[:, -len(REWARDS) :].sum(0) / max(pairs, 1)).tolist()
        return dict(zip(REWARDS, means, strict=True))

    def gather(self, result: StepResult, norm: float | torch.Tensor, stop: bool = False) -> torch.Tensor:
        """What every rank of the plan saw, equal on all of them; called on all of them.

        Args:
            norm: of the gradients that this rank owns.

        Returns:
            fp64 [ranks, 7 + n + m]: loss sum, tokens, squared norm, stop (0 or 1), seconds busy, in bubbles and
            communicating, the n numbers of ``LoadBalance.row``, and the m ``REWARDS`` of preference pairs. A TP group
            counts its loss once.
        """
        counts = self.place.tp_rank == 0
        balance = self.balance.counted() if self.balance is not None else ()
        rewards = (self.pairs.rewards(self.comm.device),) if self.pairs is not None else ()
        norm, *others = self.reader.read(norm, *result.losses, *balance, *rewards)  # the only wait for a device
        losses, others = others[: len(result.losses)], others[len(result.losses) :]
        width = len(others) - len(REWARDS) * len(rewards)
        routed, means = others[:width], [x * counts for x in others[width:]]
        if self.options.preference is not None:
            means += [0.0] * (len(REWARDS) - len(means))
        result.read(self.comm.clock)
        row = [sum(losses) * counts, result.tokens * counts, norm**2, float(stop)]
        if self.balance is not None:
            routed += [0.0] * (self.balance.width - len(routed))
        parts = [result] if result.before is None else [result, result.before]
        seconds = [
            sum(part.busy_seconds for part in parts), sum(part.bubble_seconds for part in parts),
            sum(part.communication_seconds for part in parts),
        ]  # fmt: skip
        return self.world.gather_vectors(torch.tensor(row + seconds + routed + means, dtype=torch.float64))
