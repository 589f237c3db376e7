"""Steps that must not be trusted: a loss or gradient that is not finite, a spike. Who and what caused them.

A step is judged after its gradients were summed and before the weights change. One that is suspicious is run again
with every layer watched: the same bits again mean that the numbers are what the batch and the weights give; other
bits, or none that are wrong, mean that some hardware erred, and each rank's own sums say which.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, Layout, refine
from hetero_megatron.model.gpt import ResidualStream
from hetero_megatron.parallel.optimizer import owned_norm
from hetero_megatron.pipeline.step_work import Fetch
from hetero_megatron.plans import Plan
from hetero_megatron.plans.buckets import tensor_holders
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.step_numbers import StepStats
from hetero_megatron.utils.text import listed, notice_line, rank_ranges

SPIKE_SIGMAS, SPIKE_HISTORY, SPIKE_LEAST = 6.0, 100, 20
_WEIGHT = "weight"  # how the description of a weight begins
_LAYER = re.compile(r"model\.layers\.(\d+)$")


@dataclass(frozen=True, order=True)
class NonFinite:
    """Something not finite. ``phase``: 0 a weight, 1 an output in forward, 2 a gradient; ``position`` orders them."""

    phase: int
    position: float
    what: str


@dataclass
class StepGuard:
    """Takes steps through :meth:`step` and stops what is not to be trusted.

    Args:
        check_loss: a loss that is not finite ends the run, in any dtype (off: the step is skipped).
        check_grad: so does a gradient (off: the step is skipped; with a loss scale, overflow is what it looks for).
        check_spikes: a loss of 6 standard deviations above the mean of the last 100 is run again before it counts.
        rerun: a step that comes out right at the second time counts, with a notice, instead of ending the run.
        log: for rank 0's notices.
    """

    check_loss: bool = True
    check_grad: bool = True
    check_spikes: bool = False
    rerun: bool = False
    log: Callable[[str], None] = print
    history: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_HISTORY))
    rows: torch.Tensor | None = None  # [ranks, 3]: loss sum, tokens, squared norm of the last step, per rank

    def step(
        self,
        runtime: Runtime,
        fetch: Fetch,
        number: int,
        first: int,
        size: int,
        lr: float,
        weight_decay: float = 0.0,
        clip_grad: float = 0.0,
        loss_scale: float = 1.0,
        stop: bool = False,
        ahead: bool = False,
    ) -> StepStats:
        """One optimizer step, number ``number``; see ``Runtime.train_step`` for the rest.

        Raises:
            UserError: it was not finite (on all ranks; the weights are as before).
        """
        rates = (lr, weight_decay, clip_grad, loss_scale, stop)
        stats = runtime.train_step(fetch, first, size, *rates, veto=self._suspicious, step=number, ahead=ahead)
        if self._verdict(stats.loss, stats.grad_norm):
            rows_again, place = watched_run(runtime, fetch, first, size, loss_scale, number)
            assert self.rows is not None
            self._explain(runtime, number, stats, self.rows, rows_again, place)
            stats = runtime.train_step(fetch, first, size, *rates, step=number)
        if math.isfinite(stats.loss):
            self.history.append(stats.loss)
        return stats

    def _suspicious(self, rows: torch.Tensor, loss: float, norm: float) -> bool:
        self.rows = rows
        return bool(self._verdict(loss, norm))

    def _verdict(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}" if self.check_loss else ""
        if not math.isfinite(norm):
            return "the gradient norm is not finite" if self.check_grad else ""
        if self.check_spikes and is_spike(loss, self.history):
            return f"the loss jumps to {loss:.4f} (mean of the last {len(self.history)}: {_mean(self.history):.4f})"
        return ""

    def _explain(
        self, runtime: Runtime, number: int, stats: StepStats, rows: torch.Tensor, again: torch.Tensor,
        first_nonfinite: str,
    ) -> None:
        """Say what the second run showed; UserError where the step must not be taken."""
        quantity = self._verdict(stats.loss, stats.grad_norm)
        ranks = runtime.world.ranks
        differing_ranks = [r for r, a, b in zip(ranks, rows, again, strict=True) if not _same(a, b)]
        finite = math.isfinite(stats.loss) and (math.isfinite(stats.grad_norm) or not self.check_grad)
        is_finite_again = bool(torch.isfinite(again if self.check_grad else again[:, :2]).all())
        if differing_ranks:
            blame = f"run again, rank {', '.join(map(str, differing_ranks))} gives other numbers: suspect its hardware"
        else:
            blame = "run again, every rank gives the same numbers: it is the batch or the weights, not the hardware"
        if finite or (self.rerun and is_finite_again and differing_ranks):
            self.log(notice_line(f"step {number}: {quantity}; {blame}; the step counts as it came out the second time"))
            return
        place = f"; first {first_nonfinite}" if first_nonfinite else ""
        raise UserError(
            f"{quantity} at step {number}{place}; {blame}; the step was not taken, and nothing is saved or exported "
            "after it", accepted=_remedy(first_nonfinite, bool(differing_ranks)),
        )  # fmt: skip


def _remedy(first_nonfinite: str, differ: bool) -> str:
    """What can be done; ``first_nonfinite``: by :func:`first_place`."""
    if differ:
        return "other hardware for that rank, then --load of the latest checkpoint"
    if first_nonfinite.startswith(f"not finite: {_WEIGHT}"):
        return "weights without NaN or Inf (an earlier checkpoint, another --load-hf), and a smaller --lr"
    return "a smaller --lr, other data, or more range than fp16 has (--bf16), from a checkpoint before it"


def is_spike(loss: float, history: Sequence[float] | deque[float]) -> bool:
    if len(history) < SPIKE_LEAST:
        return False
    mean = _mean(history)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in history) / len(history))
    return loss > mean + SPIKE_SIGMAS * max(deviation, 0.01 * abs(mean))


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, all NaNs alike."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def watched_run(
    runtime: Runtime, fetch: Fetch, first: int, size: int, scale: float, step: int = 0
) -> tuple[torch.Tensor, str]:
    """Forward, backward and gradient sums of step number ``step``, without the step. Called on all ranks.

    Returns:
        ([ranks, 3] as in ``StepGuard.rows``, where the first value that is not finite arose, or "").
    """
    findings: list[NonFinite] = []
    with runtime.whole_weights():
        for name, param in runtime.sync.params.items():
            if not torch.isfinite(param.detach()).all():
                findings.append(NonFinite(0, 0.0, f"{_WEIGHT} {name}"))
    with _watch(runtime, findings):
        step_result, grads = runtime.forward_backward(fetch, first, size, scale, step)
    for exchange, tensors in zip(runtime.sync.exchanges, grads, strict=True):
        names = exchange.bucket.names  # in backward order, as are the buckets
        for piece, grad in zip(exchange.pieces, tensors, strict=True):
            if not torch.isfinite(grad).all():
                position = exchange.bucket.index + names.index(piece.name) / len(names)
                findings.append(NonFinite(2, position, f"gradient of {piece.name}"))
    norm = owned_norm(grads, runtime.stage_model.kernels.l2norm, runtime.comm.device)
    rows = runtime.numbers.gather(step_result, norm)[:, :3]
    return rows, first_place(runtime, findings)


def first_place(runtime: Runtime, mine: Sequence[NonFinite]) -> str:
    """Of all ranks' findings the earliest, with the ranks that saw it."""
    place = runtime.here.place
    stage_name = f"pipeline {place.pipeline} stage {place.stage}"
    findings_of_ranks = runtime.world.gather_objects(
        (stage_name, min(mine) if mine else None), tuple[str, NonFinite | None]
    )
    sightings: list[tuple[NonFinite, int, str]] = []
    for rank, (stage_of_rank, earliest) in zip(runtime.world.ranks, findings_of_ranks, strict=True):
        if earliest is not None:
            sightings.append((earliest, rank, stage_of_rank))
    if not sightings:
        return ""
    finding, rank, stage_name = min(sightings)
    others = len({r for f, r, _ in sightings if f == finding}) - 1
    return f"not finite: {finding.what} on rank {rank} ({stage_name})" + (f" and {others} more" if others else "")


@contextmanager
def _watch(runtime: Runtime, findings: list[NonFinite]) -> Iterator[None]:
    """Look at the output of the embedding, every layer and the head in forward."""
    handles = []
    for name, module in runtime.stage_model.module.named_modules():
        layer = _LAYER.fullmatch(name)
        ends = {"model.embed_tokens": -1.0, "model.norm": 1e9, "lm_head": 2e9}
        if layer or name in ends:
            position = float(layer[1]) if layer else ends[name]
            label = f"output of layer {layer[1]}" if layer else f"output of {name}"
            handles.append(module.register_forward_hook(_looker(findings, NonFinite(1, position, label))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looker(findings: list[NonFinite], finding: NonFinite) -> Callable[..., None]:
    def look(_: object, __: object, output: torch.Tensor | ResidualStream) -> None:
        output = output.sum() if isinstance(output, ResidualStream) else output
        if not torch.isfinite(output.detach()).all():
            findings.append(finding)

    return look


FLAG = "--check-weight-hash-across-dp-replicas-interval"
_WORD = 16  # hex digits of a hash that are compared
Part = tuple[str, Box, tuple[int, ...]]  # tensor, some of it, the ranks that hold just this


class ReplicaCheck:
    """Built on every rank of the plan.

    Args:
        interval: steps between checks; None: never.
    """

    def __init__(self, runtime: Runtime, interval: int | None) -> None:
        self.runtime, self.interval = runtime, interval
        self._parts: list[Part] | None = None

    def due(self, step: int) -> bool:
        return self.interval is not None and step % self.interval == 0

    def after_step(self, step: int) -> None:
        """Called on all ranks.

        Raises:
            UserError: copies differ (on all ranks); it names the ranks that differ from most others, and tensors.
        """
        if self.interval is None or not self.due(step):
            return
        self.runtime.comm.activity = "comparing copies of weights"
        if self._parts is None:
            self._parts = list(self._held_by_several())
        values = self._values()
        digests = {f"{name}@{box.lo}": _hash(values[name], box) for name, box, _ in self._parts}
        # What the same ranks hold is compared as a whole, and only told apart where it differs.
        digest_of_tensor: dict[str, str] = {}
        for name, box, holders in self._parts:
            key = ",".join(map(str, holders))
            digest_of_tensor[key] = _digest((digest_of_tensor.get(key, "") + digests[f"{name}@{box.lo}"]).encode())
        world = self.runtime.world
        if not differing(world.ranks, world.gather_objects(digest_of_tensor, dict[str, str])):
            return
        differences = differing(world.ranks, world.gather_objects(digests, dict[str, str]))
        raise refusal(differences, step, self.interval)

    def _held_by_several(self) -> Iterator[Part]:
        rank, plan = self.runtime.comm.rank, self.runtime.here.plan
        values, layouts = self._values(), _between_uses(plan, self.runtime.here.spec)
        if (outer := plan.outer) is not None:  # weights of other islands are others
            island = outer.islands[outer.island(rank)]
            layouts = {name: layout.only(island) for name, layout in layouts.items()}
        shared_boxes: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}  # layers share layouts
        for name in sorted(values.keys() & layouts.keys()):
            layout = layouts[name]
            if id(layout) not in shared_boxes:
                shared_boxes[id(layout)] = list(_shared(layout, rank))
            yield from ((name, box, holders) for box, holders in shared_boxes[id(layout)])

    def _values(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """What this rank has of each tensor between uses, of which others may have copies."""
        boxes, sync, divided = self.runtime.stage_model.boxes, self.runtime.sync, self.runtime.divided
        params = {**dict(self.runtime.stage_model.module.named_parameters()), **sync.params}
        for name in divided.names if divided is not None else ():
            del params[name]  # nobody has a copy, but of rows that other pipelines have, too
        values = {
            name: [(boxes[name], param.detach())] for name, param in params.items()
            if name in boxes and tuple(param.shape) == tuple(boxes[name].shape)
        }  # fmt: skip
        for piece, rows in divided.owned() if divided is not None else ():
            if piece.name in sync.divided_names:
                values.setdefault(piece.name, []).append((piece.box, rows))
        return values


def _hash(held: Sequence[tuple[Box, torch.Tensor]], box: Box) -> str:
    """Of what this rank has of a tensor, that in ``box``."""
    held_box, held_values = next((b, values) for b, values in held if b.contains(box))
    values = held_values[box.slices(held_box)].contiguous().cpu()
    return _digest(memoryview(values.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _between_uses(plan: Plan, spec: ModelSpec) -> Mapping[str, Layout]:
    """What each rank has of every tensor, of which others may have copies: of weights that its stage divides, rows that
    other pipelines have, too."""
    layouts = tensor_holders(plan, spec)
    for bucket in CompiledPlan(plan, spec).divided if plan.sharding_stages else ():
        for name, owners in bucket.owners.items():
            kept = {rank: owners.of(rank) if bucket.onward is not None else () for rank in bucket.ranks}
            layouts[name] = Layout(layouts[name].shape, {**layouts[name].boxes, **kept})
    return layouts


def _shared(layout: Layout, rank: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    for cell in refine(layout):
        if len(cell.holders) > 1 and rank in cell.holders:
            yield cell.box, cell.holders


def _digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:_WORD]


def differing(ranks: Sequence[int], everyone: Sequence[Mapping[str, str]]) -> dict[str, tuple[list[int], list[int]]]:
    """By what differs: the ranks that are wrong, and those they differ from; where no value is held by most, all that
    hold it, and nobody."""
    differences = {}
    for key in dict.fromkeys(key for digests in everyone for key in digests):
        digest_by_rank = {rank: digests[key] for rank, digests in zip(ranks, everyone, strict=True) if key in digests}
        (value, votes), *other_votes = Counter(digest_by_rank.values()).most_common()
        if other_votes:
            right_ranks = [r for r, v in digest_by_rank.items() if v == value] if votes > other_votes[0][1] else []
            differences[key] = ([r for r in digest_by_rank if r not in right_ranks], right_ranks)
    return differences


def refusal(differences: Mapping[str, tuple[list[int], list[int]]], step: int, interval: int) -> UserError:
    """``differences``: by :func:`differing`, of tensors and where in them."""
    odd_ranks, right_ranks = next(iter(differences.values()), ([], []))
    odd_ranks = sorted(
        {
            rank
            for ranks, compared_with in differences.values()
            if bool(compared_with) == bool(right_ranks)
            for rank in ranks
        }
    )
    names = listed(key.partition("@")[0] for key in differences)
    if right_ranks:
        which_ranks = (
            f"on {'rank' if len(odd_ranks) == 1 else 'ranks'} {rank_ranges(odd_ranks)}, unlike on most that hold them"
        )
    else:
        which_ranks = f"between ranks {rank_ranges(odd_ranks)}"
    return UserError(
        f"copies of weights differ after step {step} {which_ranks}: {names}", field=FLAG, value=interval,
        accepted="equal bits on every rank that holds them: other hardware or kernels for the rank that differs, then "
        "--load of a checkpoint before",
    )  # fmt: skip
