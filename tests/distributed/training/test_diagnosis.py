"""A NaN is traced to its rank, layer and step; a transient fault is told from a bad batch; spikes; stragglers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.model.gpt import ResidualStream
from hetero_megatron.monitoring.stragglers import BASELINE, RECENT, SILENCE, WARM_UP, StragglerWatch
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.failure import StepGuard, is_spike
from hetero_megatron.training.step_numbers import StepStats
from tests.distributed.checkpoint.test_checkpoint import build, start, weights
from tests.support.parity import Case, RandomSamples, fixed_case
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

PLAN = plan([pipe(2, 2, stage([0, 1], [0, 2], tp=2), stage([2], [2, 3])), pipe(1, 2, stage([3], [0, 3]))])


def faulty(
    comm: Comm, case: Case, chosen: Plan, spec: ModelSpec, initial: Any, where: str, times: int, guard: StepGuard
) -> dict[str, Any]:
    """Two good steps, then one in which layer 2 of rank 2 is wrong the first ``times`` times it runs."""
    runtime = build(comm, case, chosen, spec, initial)
    if runtime is None:
        return {}
    said: list[str] = []
    guard.log = said.append
    fetch, size = RandomSamples(case, spec.vocab_size).fetch, chosen.global_batch_size
    for step in range(2):
        guard.step(runtime, fetch, step + 1, step * size, size, case.lr)
    before = weights(runtime)
    left = [times * 2]  # two micro-batches per run

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("nan")

    def hook(module: torch.nn.Module, _: Any, output: ResidualStream) -> ResidualStream:
        left[0] -= 1
        if left[0] < 0 or not torch.is_grad_enabled():
            return output
        if where == "backward":
            output.added.register_hook(spoil)
            return output
        factor = float("inf") if where == "forward" else 3.0
        return ResidualStream(output.x * factor, output.added * factor)

    if comm.rank == 2:
        dict(runtime.stage_model.module.named_modules())["model.layers.2"].register_forward_hook(hook)
    try:
        stats = guard.step(runtime, fetch, 3, 2 * size, size, case.lr)
    except UserError as error:
        same = all((a[2] == b[2]).all() for a, b in zip(before, weights(runtime), strict=True))
        return {"error": str(error), "same": same, "said": said}
    return {"loss": stats.loss, "said": said, "skipped": stats.skipped}


def run(where: str, times: int, guard: StepGuard) -> list[dict[str, Any]]:
    case = fixed_case(LLAMA, PLAN)
    spec, initial, _ = start(case)
    chosen = plan_from_dict(PLAN, spec)
    return shared_pool().run(faulty, case, chosen, spec, initial, where, times, guard)[: case.ranks]


@pytest.mark.parametrize(
    ("where", "what"), [("forward", "output of layer 2"), ("backward", "gradient of model.layers.2.")]
)
def test_what_is_not_finite_is_named(where: str, what: str) -> None:
    for seen in run(where, 99, StepGuard()):
        assert f"at step 3; first not finite: {what}" in seen["error"], seen["error"]
        assert "on rank 2 (pipeline 0 stage 1)" in seen["error"] or where == "backward"
        assert "not the hardware" in seen["error"] and seen["same"]


@pytest.mark.slow
def test_with_a_loss_scale_a_loss_that_is_not_finite_still_ends_the_run_and_a_gradient_does_not() -> None:
    for seen in run("forward", 99, StepGuard(check_grad=False)):
        assert "at step 3; first not finite: output of layer 2" in seen["error"] and seen["same"]
    for seen in run("backward", 99, StepGuard(check_grad=False)):
        assert "error" not in seen and math.isfinite(seen["loss"]) and seen["skipped"]
    undisturbed = run("forward", 0, StepGuard())
    guard = StepGuard(check_grad=False, rerun=True)
    for one, seen in zip(undisturbed, run("forward", 1, guard), strict=True):
        assert seen["loss"] == one["loss"] and "suspect its hardware" in seen["said"][0]


@pytest.mark.slow
def test_a_transient_fault_is_named_and_ends_the_run_unless_steps_may_run_again() -> None:
    undisturbed = run("forward", 0, StepGuard())
    for seen in run("forward", 1, StepGuard()):
        assert "rank 2 gives other numbers" in seen["error"] or "suspect its hardware" in seen["error"]
    for one, seen in zip(undisturbed, run("forward", 1, StepGuard(rerun=True)), strict=True):
        assert seen["loss"] == one["loss"]
        assert "suspect its hardware" in seen["said"][0] and "step 3" in seen["said"][0]


@pytest.mark.slow
def test_a_loss_spike_is_run_again_before_it_counts() -> None:
    from collections import deque

    undisturbed = run("scaled", 0, StepGuard())
    history = deque([0.0] * 1000)  # so that every loss is a spike
    for one, seen in zip(
        undisturbed, run("scaled", 1, StepGuard(check_spikes=True, history=history.copy())), strict=True
    ):
        assert seen["loss"] == pytest.approx(one["loss"], rel=1e-12)


def test_spikes() -> None:
    history = [3.0 + 0.01 * (i % 5) for i in range(50)]
    assert is_spike(4.0, history) and not is_spike(3.1, history) and not is_spike(9.0, history[:5])


def test_losses_that_are_not_finite_hide_no_spike() -> None:
    losses = [3.0 + 0.01 * (i % 5) for i in range(50)] + [math.nan, math.inf]

    class Steps:
        def train_step(self, *arguments: Any, **options: Any) -> StepStats:
            loss = losses[arguments[1]]  # first sample: the number of the step here
            return StepStats(loss, 1, 1.0, not math.isfinite(loss), False, [], [], [])

    guard = StepGuard(check_loss=False, check_grad=False, check_spikes=True)
    for number in range(len(losses)):
        guard.step(Steps(), None, number, number, 1, 1e-3)  # type: ignore[arg-type]
    assert is_spike(4.0, guard.history) and len(guard.history) == 50


def test_stragglers_are_named_once() -> None:
    watch = StragglerWatch([4, 7], {4: "big", 7: "small"})
    for _ in range(WARM_UP):
        assert watch.step([9.0, 9.0], 8) == []
    for _ in range(BASELINE):
        assert watch.step([1.0, 2.0], 8) == []
    said = [text for _ in range(RECENT + SILENCE // 2) for text in watch.step([1.1, 4.0], 8)]
    assert len(said) == 1 and str(said[0]).startswith("rank 7 (small) falls behind: it computes 4 s per step, 2.00")
    assert watch.step([50.0, 50.0], 16) == []  # another batch size: another amount of work
    calibrated = StragglerWatch([0], {0: "big"}, {0: 1.0})
    said = [text for _ in range(WARM_UP + RECENT) for text in calibrated.step([1.7], 8)]
    assert len(said) == 1 and "predicted from calibrated rates" in str(said[0]) and said[0].ratio == 1.7
    assert calibrated.behind()[0].steady
    watch = StragglerWatch([0], {0: "big"}, {0: 1.0})
    for seconds in [1.0] * (WARM_UP + RECENT) + [6.0] * (RECENT - 1):
        watch.step([seconds], 8)
    assert [b.steady for b in watch.behind()] == [False]  # named, but it is not known yet how slow it is
    watch.step([6.0], 8)
    assert [(b.steady, b.ratio) for b in watch.behind()] == [(True, 6.0)]
    watch = StragglerWatch([0], {0: "big"}, {0: 1.0}, batch_size=16)  # the prediction is for another batch size
    assert not [b for _ in range(WARM_UP + RECENT) for b in watch.step([1.7], 8)]
