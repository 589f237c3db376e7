"""What every rank of a plan tells the others at the end of a step, and what the step's numbers are then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm, Group
from hetero_megatron.pipeline.stage_work import StepResult, TimedAction
from hetero_megatron.platform.accelerator import Accelerator

if TYPE_CHECKING:
    from hetero_megatron.parallel.balance import LoadBalance, StepRouting
    from hetero_megatron.pipeline.distillation import DistillationLoss
    from hetero_megatron.pipeline.preference import PairLoss
    from hetero_megatron.pipeline.rollout_loss import RolloutLoss

_WIDEST = 8  # bytes of an element


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
        facts: what a loss beside another model's says besides itself: of preference pairs, means by TRL's names; of
            labelled answers, means over all of them.
        predictions: of each module that predicts further tokens, the sum of its losses over ``tokens``, in nats.
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
    facts: Mapping[str, float] = field(default_factory=dict)
    predictions: tuple[float, ...] = ()


class StepNumbers:
    """Gathers the numbers of all ranks of a plan.

    Args:
        world: the ranks of the plan.
        counts: whether this rank's losses count: of each TP group, those of one do.
        balance: of a mixture of experts.
        compared: the loss beside another model's, on ranks that have it; facts: names of what it says of itself.
        predictions: modules that predict further tokens.

    Attributes:
        stats: of the last step, from before its update on.
    """

    stats: StepStats

    def __init__(
        self, comm: Comm, world: Group, counts: bool, balance: LoadBalance | None,
        compared: PairLoss | DistillationLoss | RolloutLoss | None, facts: tuple[str, ...], predictions: int = 0,
    ) -> None:  # fmt: skip
        self.comm, self.world, self.reader = comm, world, ScalarReader(comm.accelerator)
        self._counts, self._balance, self._compared, self._facts = counts, balance, compared, facts
        self._predictions = predictions

    def gather(self, result: StepResult, norm: float | torch.Tensor, stop: bool = False) -> torch.Tensor:
        """What every rank saw, equal on all of them; called on all of them.

        Args:
            norm: of the gradients that this rank owns.

        Returns:
            fp64 [ranks, 7 + n + m]: loss sum, tokens, squared norm, stop (0 or 1), seconds busy, in bubbles and
            communicating, the n numbers of ``LoadBalance.row``, and the m facts of a loss beside another model's, or
            loss sums of modules that predict further tokens.
        """
        counts = self._counts
        balance = self._balance.counted() if self._balance is not None else ()
        facts = (self._compared.facts(self.comm.device),) if self._compared is not None else ()
        norm, *others = self.reader.read(norm, *result.losses, *balance, *facts)  # the only wait for a device
        count = sum(losses.numel() for losses in result.losses)
        losses, others = others[:count], others[count:]
        width = len(others) - len(self._facts) * len(facts)
        routed, means = others[:width], [x * counts for x in others[width:]]
        means += [0.0] * (len(self._facts) - len(means))
        sums = [0.0] * (1 + self._predictions)
        each = count // max(len(result.losses), 1)  # an evaluation has the main loss alone
        for i in range(each):
            sums[i] = sum(losses[i::each]) * counts
        means += sums[1:]
        result.read(self.comm.clock)
        row = [sums[0], result.tokens * counts, norm**2, float(stop)]
        if self._balance is not None:
            routed += [0.0] * (self._balance.width - len(routed))
        parts = [result] if result.before is None else [result, result.before]
        seconds = [
            sum(part.busy_seconds for part in parts), sum(part.bubble_seconds for part in parts),
            sum(part.communication_seconds for part in parts),
        ]  # fmt: skip
        return self.world.gather_vectors(torch.tensor(row + seconds + routed + means, dtype=torch.float64))

    def routing(self, every: torch.Tensor, tokens: float) -> StepRouting | None:
        """Of what :meth:`gather` gives, the part of the experts; None: there are none."""
        if self._balance is None:
            return None
        more = len(self._facts) + self._predictions
        return self._balance.routing(every[:, 7 : every.shape[1] - more], tokens)

    def facts(self, every: torch.Tensor, count: float) -> dict[str, float]:
        """Of what :meth:`gather` gives, what the loss says besides itself, as means over its pairs, answers or tokens:
        such means can be averaged, and are shown as ``spec.preference.shown_means`` has them."""
        if not self._facts:
            return {}
        means = (every[:, -len(self._facts) :].sum(0) / max(count, 1)).tolist()
        return dict(zip(self._facts, means, strict=True))

    def predictions(self, every: torch.Tensor, tokens: float) -> tuple[float, ...]:
        """Of what :meth:`gather` gives, the losses of modules that predict further tokens."""
        sums = every[:, every.shape[1] - self._predictions :].sum(0)
        return tuple((sums / max(tokens, 1)).tolist())


class ScalarReader:
    """Reads numbers that were computed on a device: one copy to pinned memory, one wait for it.

    Args:
        accelerator: of the device; None: numbers are in host memory.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._memory: torch.Tensor | None = None

    def read(self, *values: float | torch.Tensor) -> list[float]:
        """The elements of tensors of any dtype and shape, and numbers, as numbers. Waits for all that the current
        stream has queued, even if there is no tensor: so that what was timed on it can be read, too."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for x in values:
            if isinstance(x, torch.Tensor):
                by_dtype.setdefault(x.dtype, []).append(x.detach().flatten())
        joined = {dtype: torch.cat(tensors) for dtype, tensors in by_dtype.items()}
        host = joined if self._accelerator is None else self._copied(joined, self._accelerator)
        left = {dtype: iter(x.tolist()) for dtype, x in host.items()}
        numbers: list[float] = []
        for x in values:
            numbers += islice(left[x.dtype], x.numel()) if isinstance(x, torch.Tensor) else [float(x)]
        return numbers

    def _copied(
        self, tensors: dict[torch.dtype, torch.Tensor], accelerator: Accelerator
    ) -> dict[torch.dtype, torch.Tensor]:
        """In pinned memory, after one wait."""
        size = sum(_WIDEST * x.numel() for x in tensors.values())
        if self._memory is None or self._memory.numel() < size:
            self._memory = accelerator.host_memory(max(size, 4 * _WIDEST))
        host, at = dict[torch.dtype, torch.Tensor](), 0
        for dtype, x in tensors.items():
            host[dtype] = self._memory[at : at + x.nbytes].view(dtype)
            host[dtype].copy_(x, non_blocking=True)
            at += _WIDEST * x.numel()
        event = accelerator.event()
        event.record(accelerator.current_stream())
        event.synchronize()
        return host
