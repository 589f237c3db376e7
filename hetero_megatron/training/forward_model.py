"""A second model on a run's ranks that only runs forward: no gradients, no optimizer, weights whole on their ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.ops import KernelPlan
from hetero_megatron.pipeline.distillation import DistillationLoss, TeacherHead
from hetero_megatron.pipeline.stage_model import Initialize, RankStage, StageModel
from hetero_megatron.pipeline.stage_work import LossFunction, StepResult
from hetero_megatron.pipeline.step_work import Fetch, StepWork, build_executor, random_kept
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec.dropout import NO_DROPOUT
from hetero_megatron.training.step_numbers import ScalarReader

# (the stage, its model) -> what takes the place of the loss on a stage with a head
Ending = Callable[[RankStage, StageModel], LossFunction]


class ForwardModel:
    """Built alike on every rank of the plan.

    Args:
        compiled: its groups have been created, on all ranks of the job.
        ending: what becomes of the head's input.
    """

    def __init__(
        self, compiled: CompiledPlan, comm: Comm, dtype: torch.dtype, initialize: Initialize, kernels: KernelPlan,
        ending: Ending,
    ) -> None:  # fmt: skip
        self.comm, self.here = comm, RankStage(compiled.plan, compiled.spec, comm.rank)
        self.stage_model = built = StageModel(self.here, comm, dtype, kernels, initialize, NO_DROPOUT)
        built.module.requires_grad_(False)
        self._take: LossFunction = NoLoss()
        if self.here.stage.head:
            self._take = ending(self.here, built)
        gradients = kernels.weight_gradients
        self._executor = build_executor(compiled, self.here, comm, built.module, self._take, dtype, gradients)
        self._work, self._reader = StepWork(compiled, self.here, comm), ScalarReader(comm.accelerator)

    def rows(self, first_sample: int, batch_size: int) -> list[range]:
        """The global samples that this rank works on, of each micro-batch of a batch; perhaps none of some."""
        return self._work.samples(first_sample, batch_size)[1]

    @torch.no_grad()
    def run(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult:
        """Forward, of the global samples ``[first_sample, first_sample + batch_size)``; called on all ranks."""
        work = self._work.make(fetch, first_sample, batch_size, True, None)
        devices = self.comm.islands is not None and self.comm.islands.has_devices
        if devices and self._work.first_use(batch_size, True)[1]:  # see Runtime.warm_up
            with random_kept(self.comm.accelerator):
                self._executor.rehearse(work)
            work = self._work.make(fetch, first_sample, batch_size, True, None)
        step_result = self._executor.run(work)
        self._reader.read()  # the clock is used again
        step_result.read(self.comm.clock)
        return step_result


class NoLoss:
    """Of a model whose outputs others use."""

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        return out.new_zeros(())

    def count(self, batch: Batch) -> int:
        return 0


class _Keep(NoLoss):
    """Leaves the head's inputs where the student's loss finds them."""

    def __init__(self, teacher: TeacherHead) -> None:
        self._teacher = teacher

    def __call__(self, out: torch.Tensor, batch: Batch, seed: float) -> torch.Tensor:
        self._teacher.put(batch.samples, out)
        return super().__call__(out, batch, seed)


class Teacher:
    """A teacher on the ranks of its student, whose plan cuts both; it speaks before each step and evaluation.

    Args:
        loss: of the student, on ranks with its head.

    Other arguments: those of :class:`ForwardModel`.
    """

    def __init__(
        self, compiled: CompiledPlan, comm: Comm, dtype: torch.dtype, initialize: Initialize, kernels: KernelPlan,
        loss: DistillationLoss | None,
    ) -> None:  # fmt: skip
        self._loss = loss
        self.model = ForwardModel(compiled, comm, dtype, initialize, kernels, self._keep)

    def _keep(self, here: RankStage, built: StageModel) -> LossFunction:
        assert self._loss is not None, "student and teacher have their heads on the same ranks"
        built.module.lm_head.in_loss = True
        self._loss.teacher = TeacherHead(built.module.lm_head)
        return _Keep(self._loss.teacher)

    def before_forward(self, fetch: Fetch, first_sample: int, batch_size: int) -> StepResult:
        """See :class:`~hetero_megatron.training.runtime_options.StepHooks`."""
        if self._loss is not None and self._loss.teacher is not None:
            self._loss.teacher.begin_step()
        return self.model.run(fetch, first_sample, batch_size)
