"""One rank of a plan, ready to train: the stage, its executor, gradient synchronisation and optimizer.

``train_step`` and ``evaluate`` address data by global sample index and return numbers that are equal on every
rank and, up to floating-point reassociation, equal for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.layout import Box
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.parallel.divided_weights import DividedWeights, apply_divided_weights
from hetero_megatron.parallel.grad_sync.gathering import apply_parameter_gather
from hetero_megatron.parallel.grad_sync.gradients import GradientSync
from hetero_megatron.parallel.optimizer import OptimizerFactory, ShardedOptimizer, owned_norm, scales_and_norms
from hetero_megatron.pipeline.stage_model import Initialize, RankStage, StageLoss, StageModel
from hetero_megatron.pipeline.stage_work import StageWork, StepResult
from hetero_megatron.pipeline.step_work import Fetch, StepWork, build_executor, random_kept
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import logical_tensors
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.training.runtime_options import PLAIN, RuntimeOptions, StepHooks, stages_fit
from hetero_megatron.training.step_numbers import StepNumbers, StepStats

if TYPE_CHECKING:
    from hetero_megatron.parallel.balance import LoadBalance, StepRouting
    from hetero_megatron.parallel.device_graphs import LayerGraphs
    from hetero_megatron.parallel.outer_steps import OuterSteps
    from hetero_megatron.pipeline.distillation import DistillationLoss
    from hetero_megatron.pipeline.preference import PairLoss
    from hetero_megatron.pipeline.rollout_loss import RolloutLoss

    Compared = PairLoss | DistillationLoss | RolloutLoss

OwnedGradients = list[list[torch.Tensor]]  # per bucket and owned piece, in at least fp32
# (loss sum, tokens and squared norm of each rank: fp64 [ranks, 3]; loss; norm) -> whether the step is not to be taken
Veto = Callable[[torch.Tensor, float, float], bool]


class Runtime:
    """Built alike on every rank of the plan; see the module docstring.

    Args:
        compiled: its groups have been created, on all ranks of the job.
        dtype: of parameters and activations (fp64, fp32, bf16, fp16).
        initialize: initial values by logical tensor and box.
        optimizer: makes the optimizer; None for evaluation only.
        kernels: of this rank's stage; None: without plugins, as the plan's stage wishes.

    Attributes:
        here: its place, stage and unit in the plan.
        stage_model: the layers that it holds, and how.
        loss: of the stage.
        executor, step_work: run the actions of a step, and say which they are.
        sync, optimizer: sums of gradients; what updates the weights by them (None: evaluation only).
        outer, divided: steps between islands, and weights that the ranks of the stage divide, where there are any.
        balance: of a mixture of experts, else None.
        graphs: device graphs of the layers, where they are asked for.
        numbers: what all ranks of the plan tell each other.
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
        spec = compiled.spec
        stages_fit(options, compiled.plan)
        self.comm, self.options, self.hooks = comm, options, StepHooks()
        self.here = here = RankStage(compiled.plan, spec, comm.rank)
        if kernels is None:
            compiles, logits_bytes = options.compile_backend is not None, options.logits_bytes
            kernels = here.kernels(dtype, comm.device, compiles, logits_bytes, options.fp8, options.dropout)
        # Where nothing is trained, divided weights stay whole.
        shared = [b for b in compiled.divided if comm.rank in b.ranks] if optimizer is not None else []
        self.stage_model = built = StageModel(
            here, comm, dtype, kernels, initialize, options.dropout, {n for b in shared for n in b.names},
            options.narrow_tp_sums,
        )  # fmt: skip
        self.balance: LoadBalance | None = None
        if spec.moe is not None:
            from hetero_megatron.parallel.balance import LoadBalance

            self.balance = LoadBalance(built.module, here.plan, spec, options.balancing, comm, dtype)
        if options.compile_backend is not None:
            from hetero_megatron.parallel.recompute import apply_compile

            apply_compile(built.module, options.compile_backend)
        self.loss = self._loss(kernels, dtype)
        self.numbers = StepNumbers(
            comm, comm.group(here.plan.ranks), here.place.tp_rank == 0, self.balance, self.compared,
            options.facts, spec.mtp_layers,
        )  # fmt: skip
        self.executor = build_executor(compiled, here, comm, built.module, self.loss, dtype, kernels.weight_gradients)
        self.executor.activations = built.offloaded
        self.step_work = StepWork(compiled, here, comm)
        self.sync = self._gradient_sync(compiled)
        self.graphs: LayerGraphs | None = None
        if options.graphs_after is not None:
            from hetero_megatron.parallel.device_graphs import LayerGraphs

            self.graphs = LayerGraphs(built.module, here.stage.chunks, comm, self.sync, options.graphs_after)
        by_load = [t.name for t in logical_tensors(spec) if t.by_load]
        offload = here.stage.optimizer.offload
        self.optimizer: ShardedOptimizer | None = None
        if optimizer is not None:
            self.optimizer = ShardedOptimizer(self.sync, optimizer, offload, by_load, built.owned_values, built.rows)
            gather = apply_parameter_gather(built.module, self.optimizer.gather, logical_tensors(spec))
            self.hooks.before_reading = gather.finish
        self.outer = self._outer_steps(compiled)
        self.divided = self._divided_weights(compiled)

    @property
    def world(self) -> Group:  # the ranks of the plan
        return self.numbers.world

    @property
    def compared(self) -> Compared | None:
        """The loss, where it is one beside another model (:attr:`pairs`: of answers); None: it is not, or no head."""
        return None if isinstance(self.loss, StageLoss) else self.loss

    @property
    def pairs(self) -> PairLoss | None:
        return cast("PairLoss | None", self.compared) if self.options.preference is not None else None

    def _loss(self, kernels: KernelPlan, dtype: torch.dtype) -> StageLoss | Compared:
        here, comm, options, model = self.here, self.comm, self.options, self.stage_model.module
        if options.distillation is not None and here.stage.head:
            from hetero_megatron.pipeline.distillation import distillation_loss

            return distillation_loss(here, comm, options.distillation, model, kernels, dtype, options.logits_bytes)
        group, chunk = comm.group(here.unit.ranks), here.loss_chunk(dtype, options.logits_bytes)
        tokens = StageLoss(here, model, kernels, group, chunk)
        if here.stage.head and options.grpo is not None:
            from hetero_megatron.pipeline.rollout_loss import RolloutLoss

            return RolloutLoss(options.grpo, tokens)
        if here.stage.head and options.preference is not None:
            from hetero_megatron.pipeline.preference import pair_loss

            return pair_loss(here, comm, options.preference, tokens)
        return tokens

    def _gradient_sync(self, compiled: CompiledPlan) -> GradientSync:
        """Of the trained parameters; weights whose gradient is one product get it in place."""
        built, head = self.stage_model, self.loss.head
        params = {name: p for name, p in built.module.named_parameters() if p.requires_grad}
        sent_as = torch.bfloat16 if self.options.reduce_in_bf16 else None
        how = sent_as, self.here.stage.weights is not None, self.options.fixed_order, built.rows
        sync = GradientSync(self.comm, params, built.boxes, compiled.buckets, built.chunk_names(), *how)
        gradients = built.kernels.weight_gradients
        if self.options.compile_backend is None:
            sync.fuse_wgrad_accumulation(built.products(head=head is None), gradients)
        if head is not None and built.module.lm_head.matrix.requires_grad:
            spec = self.here.spec
            used_twice = spec.tied and (self.here.stage.embed or spec.mtp_layers > 0)
            sync.fuse_head_wgrad(built.module.lm_head.matrix, gradients, again=used_twice)
        return sync

    def _divided_weights(self, compiled: CompiledPlan) -> DividedWeights | None:
        """Of a stage that divides its weights: they have memory while they are used, or where nothing is trained."""
        built = self.stage_model
        if self.here.stage.weights is None:
            return None
        buckets = [bucket for bucket in compiled.divided if self.comm.rank in bucket.ranks]
        params = dict(built.module.named_parameters())
        divided = DividedWeights(
            self.here.stage, self.here.spec.tied, buckets, params, self.sync.divided_sums, self.comm,
            built.stored_boxes, built.kernels.weight_gradients, built.rows,
        )  # fmt: skip
        apply_divided_weights(built.module, divided)
        self.executor.weights = divided
        if self.optimizer is not None:
            frozen = {b.index: built.owned_values(b.names, divided.pieces[b.index]) for b in buckets if not b.trained}
            divided.attach(self.optimizer.kept, frozen)
        return divided

    def _outer_steps(self, compiled: CompiledPlan) -> OuterSteps | None:
        if self.here.plan.outer is None or self.optimizer is None:
            return None
        from hetero_megatron.parallel.outer_steps import OuterSteps

        return OuterSteps(compiled, self.comm, self.optimizer)

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
        self.hooks.before_update()
        return self.outer.global_weights()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Context in which the model's parameters can be read; called on all ranks."""
        return self.divided.whole() if self.divided is not None else nullcontext()

    def use_schedules(self, compiled: CompiledPlan) -> None:
        """Go on with the schedules of a plan that has the same stages as this one."""
        self.step_work.use_schedules(compiled)

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
        if self.stage_model.row_norms is not None:
            self.hooks.before_reading()
            self.stage_model.row_norms.refresh()
        lora, draws = self.here.spec.lora, None
        adapters = lora is not None and lora.dropout > 0
        if not forward_only and (self.options.dropout != NO_DROPOUT or adapters):
            draws = partial(Draws if self.graphs is None else self.graphs.draws, self.options.seed, step)
        return self.step_work.make(fetch, first_sample, batch_size, forward_only, draws)

    def warm_up(
        self, fetch: Fetch, first_sample: int, batch_size: int, forward_only: bool = False, step: int = 0
    ) -> None:
        """Before the first step, and the first evaluation, and those whose micro-batches have other sizes in any
        pipeline: use all that it will use on devices once, with no message pending (see
        :meth:`PipelineExecutor.rehearse`). Called on all ranks; where no rank of the job has a device, it does nothing.
        Weights, random numbers and memory are as if it had not been. Arguments are those of :meth:`work`.
        """
        if self.comm.islands is None or not self.comm.islands.has_devices:
            return
        is_first, has_new_sizes = self.step_work.first_use(batch_size, forward_only)
        if not has_new_sizes:
            return
        self.hooks.before_reading()
        if self.graphs is not None:
            self.graphs.warmed_up = False  # until the step begins
        rehearsal = self.compared.rehearsal() if self.compared is not None else nullcontext()
        with random_kept(accelerator := self.comm.accelerator), self.hooks.unwatched(), rehearsal:
            self.executor.rehearse(self.work(fetch, first_sample, batch_size, forward_only, step))
            if not forward_only:
                self.sync.rehearsed()
        if is_first and accelerator is not None:
            accelerator.forget_peak_memory()

    def forward_backward(
        self, fetch: Fetch, first_sample: int, batch_size: int, loss_scale: float = 1.0, step: int = 0
    ) -> tuple[StepResult, OwnedGradients]:
        """Forward, backward and sums of gradients of step number ``step``; called on all ranks.

        Returns:
            this rank's losses and times, and the gradients that it owns: of the sum of token losses times
            ``loss_scale`` over the nominal number of tokens of the batch.
        """
        reference_result = self.reference_in_step(fetch, first_sample, batch_size)
        work = self.work(fetch, first_sample, batch_size, step=step)
        # Seeding with the nominal count keeps 16-bit gradients in range; the true count is applied later.
        work = replace(work, seed=loss_scale / self.nominal(batch_size))
        if self.balance is not None:
            self.balance.begin(work.seed)
        step_result = self.executor.run(work, self.sync)
        step_result.before = reference_result
        self.comm.activity = "gradient synchronisation"
        return step_result, self.sync.finish()

    def nominal(self, batch_size: int) -> int:
        """About how many losses the samples of a batch have: of tokens, or of pairs."""
        return batch_size * (self.here.plan.seq_length if self.options.preference is None else 1)

    def reference_in_step(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult | None:
        """A batch begins: compute what another model says of it, where there is one (else None); on all ranks."""
        preference = self.options.preference
        if self.compared is not None:
            self.compared.begin()
        if preference is None or preference.unpaired or not (preference.refers and preference.in_step):
            return self.hooks.before_forward(fetch, first_sample, batch_size)
        return self.record_reference(fetch, first_sample, batch_size)

    @torch.no_grad()
    def record_reference(
        self, fetch: Fetch, first_sample: int, batch_size: int, recording: AbstractContextManager[None] | None = None
    ) -> StepResult:
        """Compute log-probabilities of answers under the model as it is, without adapters; called on all ranks. They
        are in ``pairs.reference`` of the ranks with a head, or where ``recording`` says."""
        recording = recording or (self.pairs.record() if self.pairs is not None else nullcontext())
        adapters = self.stage_model.adapters.off() if self.stage_model.adapters is not None else nullcontext()
        with recording, adapters:
            step_result = self.executor.run(self.work(fetch, first_sample, batch_size, forward_only=True))
        self.numbers.reader.read()  # the clock is used again
        step_result.read(self.comm.clock)
        return step_result

    def train_step(
        self, fetch: Fetch, first_sample: int, batch_size: int, lr: float, weight_decay: float = 0.0,
        clip_grad: float = 0.0, loss_scale: float = 1.0, stop: bool = False, veto: Veto | None = None, step: int = 0,
        ahead: bool = False,
    ) -> StepStats:  # fmt: skip
        """Take one optimizer step; called on all ranks, with equal arguments but for ``stop``.

        Args:
            fetch: gives the rows of the batch with these global sample indices.
            first_sample, batch_size: of the global batch, in sequences.
            clip_grad: largest norm of the gradient; 0: no clipping.
            loss_scale: factor on the loss in backward; gradients are divided by it.
            stop: told to all ranks.
            veto: asked before the weights change, with the same values on all ranks.
            step: its number, from 1, which dropout depends on.
            ahead: weights may be on their way until the next step's forward; not where ``stop`` is set on some rank.

        Raises:
            UserError: no token of the batch counts in the loss, or the plan has no schedule for its size.
            CommError: a peer is gone.
        """
        assert self.optimizer is not None
        with self.comm.clock.counting():
            self.warm_up(fetch, first_sample, batch_size, step=step)
            if self.graphs is not None:
                self.graphs.begin_step()
            step_result, grads = self.forward_backward(fetch, first_sample, batch_size, loss_scale, step)
            self.hooks.before_reading()  # what no forward of this step used
            self.hooks.before_commit()
            norm = owned_norm(grads, self.stage_model.kernels.l2norm, self.comm.device)
            gathered = self.numbers.gather(step_result, norm, stop)
            loss_sum, tokens, _, stops = gathered[:, :4].sum(0).tolist()
            islands = [gathered[places] for places in self.outer.places] if self.outer is not None else [gathered]
            island_scales = scales_and_norms(islands, self.nominal(batch_size) / loss_scale, first_sample, batch_size)
            loss, norm = loss_sum / tokens, max(norm for _, norm in island_scales)
            vetoed = veto is not None and veto(gathered[:, :3], loss, norm)
            skipped = vetoed or not math.isfinite(norm)
            routing = self.numbers.routing(gathered, tokens)
            facts = {**self.hooks.facts(), **self.numbers.facts(gathered, tokens)}
            busy, bubble, communication = gathered[:, 4:7].T.tolist()
            self.numbers.stats = stats = StepStats(
                loss, int(tokens), norm, skipped, bool(stops), busy, bubble, communication, step_result.actions,
                routing, facts, self.numbers.predictions(gathered, tokens),
            )  # fmt: skip
            if not skipped:
                scale, own_norm = island_scales[self.outer.index if self.outer is not None else 0]
                clip = min(1.0, clip_grad / (own_norm + 1e-6)) if clip_grad > 0 else 1.0
                if self.outer is not None:
                    self.outer.count([rows[:, 1].sum().item() for rows in islands])
                self._update(grads, scale * clip, (lr, weight_decay), routing, ahead and not stops)
        return stats

    def _update(
        self, grads: OwnedGradients, scale: float, rates: tuple[float, float], routing: StepRouting | None, ahead: bool
    ) -> None:
        assert self.optimizer is not None
        self.hooks.before_update()
        self.comm.activity = "the optimizer step"
        if self.balance is not None and routing is not None:
            self.balance.move_bias(self.optimizer.owned(), routing)
        self.optimizer.set_rates(*rates)
        self.optimizer.step(grads, scale, ahead and self.divided is None)

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
        """The same, with what a loss beside another model's says besides, as means."""
        with self.comm.clock.counting():
            self.warm_up(fetch, first_sample, batch_size, forward_only=True)
            reference_result = self.reference_in_step(fetch, first_sample, batch_size)
            step_result = self.executor.run(self.work(fetch, first_sample, batch_size, forward_only=True))
            step_result.before = reference_result
            gathered = self.numbers.gather(step_result, 0.0)
            loss_sum, tokens = gathered[:, :2].sum(0).tolist()
        return loss_sum, int(tokens), self.numbers.facts(gathered, tokens)
