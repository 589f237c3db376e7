"""A plan and a model, compiled once: what training, the dry run, calibration and predictions derive from them.

Every part is made when it is first asked for, and kept: so a dry run of one rank of thousands makes the boundaries of
that rank's stage only, and who only needs the buckets makes no schedule. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hetero_megatron.layout import Layout, Transfer, transfer
from hetero_megatron.plans.buckets import (
    BUCKET_BYTES,
    Bucket,
    make_buckets,
    plan_groups,
    tensor_holders,
)
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.program import step_schedules, validate_step
from hetero_megatron.plans.shares import activation_layout
from hetero_megatron.schedule import Schedule
from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class StageBoundary:
    """What moves between two neighbouring stages for one size of micro-batch.

    Attributes:
        upstream, downstream: activation layouts over (sequence, token, hidden).
        forward: from upstream to downstream; gradients take the adjoint way.
    """

    upstream: Layout
    downstream: Layout
    forward: Transfer


@dataclass(frozen=True)
class CompiledPlan:
    """A valid plan for a model.

    Args:
        bucket_bytes: most bytes (fp32) of gradients in a bucket.
        pairs: the loss is one of preference pairs.
        muon: the optimizer is Muon, whose matrices have whole owners.
    """

    plan: Plan
    spec: ModelSpec
    bucket_bytes: int = BUCKET_BYTES
    pairs: bool = False
    muon: bool = False
    _schedules: dict[int, tuple[Schedule, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _boundaries: dict[tuple[int, int, int], StageBoundary] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def holders(self) -> Mapping[str, Layout]:
        """For every logical tensor, which box each rank holds."""
        return tensor_holders(self.plan, self.spec)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In which gradients are synchronised, in backward order; the same on every rank."""
        return make_buckets(self.plan, self.spec, self.bucket_bytes, holders=self.holders, muon=self.muon)

    @cached_property
    def frozen(self) -> tuple[Bucket, ...]:
        """In which the frozen weights that stages divide are gathered."""
        if self.spec.lora is None or not self.plan.sharding_stages:
            return ()
        from hetero_megatron.plans.frozen_buckets import frozen_buckets

        return frozen_buckets(self.plan, self.spec, self.holders)

    @cached_property
    def divided(self) -> tuple[Bucket, ...]:
        """Of all weights that stages divide, trained or frozen."""
        return (*(b for b in self.buckets if b.weights is not None), *self.frozen)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All groups that some ranks exchange data in, for ``Comm.create_groups`` on every rank of the job."""
        return tuple(plan_groups(self.plan, (*self.buckets, *self.frozen), self.spec, self.pairs))

    @cached_property
    def forward_groups(self) -> tuple[tuple[int, ...], ...]:
        """Those that a model needs which only runs forward."""
        return tuple(plan_groups(self.plan, (), self.spec, self.pairs))

    def schedules(self, batch_size: int | None = None) -> tuple[Schedule, ...]:
        """Per pipeline, all that its stages do in a step of ``batch_size`` sequences (None: the plan's).

        Raises:
            ScheduleError: it cannot run; every schedule is validated when it is first asked for.
        """
        size = batch_size or self.plan.global_batch_size
        if size not in self._schedules:
            schedules = step_schedules(self.plan, self.buckets, size)
            validate_step(self.plan, self.buckets, self.spec, schedules)
            self._schedules[size] = schedules
        return self._schedules[size]

    def boundary(self, pipeline: int, upstream: int, size: int) -> StageBoundary:
        """Between stages ``upstream`` and ``upstream + 1`` of a pipeline (from the last one to the first, where stages
        have several chunks), for micro-batches of ``size`` sequences."""
        key = (pipeline, upstream, size)
        if key not in self._boundaries:
            up, down = (
                activation_layout(self.plan, pipeline, stage, size, self.spec.hidden_size)
                for stage in (upstream, (upstream + 1) % len(self.plan.pipelines[pipeline].stages))
            )
            self._boundaries[key] = StageBoundary(up, down, transfer(up, down))
        return self._boundaries[key]
