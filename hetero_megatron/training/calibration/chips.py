"""Seconds of stages, optimizer and step on the chips of a job, measured inside short running pipelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.layout.mask import FULL, Tile
from hetero_megatron.model import initial_values
from hetero_megatron.ops import KernelPlan, attention
from hetero_megatron.ops.block_attention import BlockAttention, accumulators, key_heads
from hetero_megatron.ops.optimizer_ops import l2norm_aten
from hetero_megatron.ops.tile_kernels import tile_kernel
from hetero_megatron.parallel.exchange import HopExchange
from hetero_megatron.parallel.optimizer import squared_norm
from hetero_megatron.parallel.update import Optimizer, OptimizerFactory
from hetero_megatron.plan import Plan
from hetero_megatron.plan.buckets import make_buckets, plan_groups
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.calibration.runs import Observation, Phase, Run, middle
from hetero_megatron.training.runtime import Runtime

Kernels = Callable[[Plan, ModelSpec], KernelPlan]  # of this rank's stage
OPTIMIZER_ELEMENTS = (1 << 18, 1 << 21)
LEAST, MOST, ENOUGH = 5, 100, 0.5  # of each step: repeats of what is timed alone, few where they take long; seconds
VISITS = 4  # blocks of keys, against one


@dataclass(frozen=True)
class Job:
    """What all runs of a calibration have in common. ``kernels``: as runs would have them; None: torch's own."""

    comm: Comm
    dtype: torch.dtype
    optimizer: OptimizerFactory
    kernels: Kernels | None = None


@dataclass(frozen=True)
class Observed:
    """What a rank saw of its chip in one run.

    Attributes:
        saved: what a step's first backward takes less than the others, in seconds per byte of weights.
        computed: the chip's seconds in the actions of each step.
        tail: those outside of them; owned: the elements that are updated then.
    """

    rank: int
    observation: Observation
    saved: float
    computed: tuple[float, ...]
    tail: float
    owned: int


def observe(run: Run, chip: str, job: Job, steps: int) -> Observed | None:
    """Take part in ``run``; every rank of the job calls it, also those that the plan leaves out (None). ``chip``: its
    own."""
    runtime, comm = _runtime(run, job), job.comm
    if runtime is None:
        return None
    forward: list[float] = []
    backward: list[float] = []
    apart: dict[str, list[float]] = {"F": [], "B": []}
    computed: list[float] = []
    tails: list[float] = []
    saved: list[float] = []
    for step in range(steps + 1):
        before = comm.clock.computed
        stats = runtime.train_step(_fetch(run), 0, run.plan.global_batch_size, lr=1e-6)
        actions = sum(t.computed for t in stats.actions)
        tail = comm.clock.computed - before - actions
        if step == 0:  # allocations, caches, lazy initialisation
            continue
        for kind, into in (("F", forward), ("B", backward)):
            alone, *others = [t.computed for t in stats.actions if t.action.kind == kind]
            into += others
            apart[kind] += [t.end - t.start - t.computed for t in stats.actions if t.action.kind == kind]
            saved += [middle(others) - alone] if kind == "B" else []
        computed.append(actions)
        tails.append(tail)
    stage = runtime.stage
    width = max(forward) - min(forward) + max(backward) - min(backward)
    observation = Observation(
        chip, stage.ranks, run.tp, run.micro_batch_size, stage.num_layers, stage.embed, stage.head,
        middle(forward), middle(backward), width / (middle(forward) + middle(backward)),
        (middle(apart["F"]), middle(apart["B"])),
    )  # fmt: skip
    assert runtime.optimizer is not None
    owned = sum(master.numel() for _, _, master in runtime.optimizer.owned())
    held = sum(p.numel() * p.element_size() for p in runtime.model.parameters())
    return Observed(comm.rank, observation, middle(saved) / held, tuple(computed), min(tails), owned)


def observe_exchange(run: Run, chip: str, job: Job, steps: int) -> list[Phase]:
    """Take part in a run of replicas; every rank of the job calls it. What this rank's chip did, bucket by bucket."""
    runtime = _runtime(run, job)
    if runtime is None:
        return []
    found: list[Phase] = []
    for hop in (hop for exchange in runtime.sync.exchanges for hop in exchange.hops):
        hop.runs = None  # as between replicas of unlike degrees: replicas of one chip each would copy next to nothing
        _time_phases(hop, chip, job.dtype, found)
    for step in range(steps + 1):
        if step == 1:  # the first one allocates
            found.clear()
        runtime.train_step(_fetch(run), 0, run.plan.global_batch_size, lr=1e-6)
    return found


def _runtime(run: Run, job: Job) -> Runtime | None:
    """This rank of the run; one that its plan leaves out makes the groups with the others, and gets None."""
    comm = job.comm
    if comm.rank not in run.plan.ranks:
        comm.create_groups(plan_groups(run.plan, make_buckets(run.plan, run.spec)))
        return None

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return initial_values(tensor, box, run.spec, seed=0)

    chosen = job.kernels(run.plan, run.spec) if job.kernels is not None else None
    return Runtime(run.plan, run.spec, comm, job.dtype, initialize, job.optimizer, kernels=chosen)


def _time_phases(exchange: HopExchange, chip: str, dtype: torch.dtype, found: list[Phase]) -> None:
    """Note what each call of ``exchange`` computes."""
    clock, ranks = exchange.group.comm.clock, exchange.group.size
    wide = torch.promote_types(dtype, torch.float32).itemsize
    given, taken = exchange.given, exchange.taken
    calls = {
        "start": ("pack", given * wide, 1),
        "finish": ("add", (taken + exchange.size) * wide, ranks),
        "start_back": ("pack", taken * dtype.itemsize, 1),
        "finish_back": ("unpack", given * dtype.itemsize, 1),
    }

    def timed(name: str, kind: str, size: int, count: int) -> None:
        plain = getattr(exchange, name)

        def call(*arguments: object) -> object:
            clock.settle()
            before = clock.computed
            out = plain(*arguments)
            clock.settle()
            found.append(Phase(chip, kind, size, count, clock.computed - before))
            return out

        setattr(exchange, name, call)

    for name, what in calls.items():
        timed(name, *what)


def _fetch(run: Run):  # type: ignore[no-untyped-def]
    def fetch(indices: Sequence[int]) -> Batch:
        shape = (len(indices), run.plan.seq_length)
        generator = torch.Generator().manual_seed(indices[0])
        tokens = torch.randint(0, run.spec.vocab_size, shape, generator=generator)
        return Batch(tokens, tokens, torch.arange(shape[1]).expand(shape))

    return fetch


def _repeated(measure: Callable[[], Sequence[float]], steps: int) -> list[float]:
    """:func:`middle` of each of the seconds that ``measure`` returns, of ``LEAST`` to ``MOST`` calls after a first."""
    measure()
    end, found = time.perf_counter() + steps * ENOUGH, list[Sequence[float]]()
    while len(found) < LEAST or (len(found) < steps * MOST and time.perf_counter() < end):
        found.append(measure())
    return [middle(column) for column in zip(*found)]


def optimizer_seconds(job: Job, steps: int) -> list[tuple[int, float]]:
    """(elements, seconds) of norm, scaling and update of so many owned elements."""
    comm, wide = job.comm, torch.promote_types(job.dtype, torch.float32)
    rows = []
    for elements in OPTIMIZER_ELEMENTS:
        # Pieces of one owner are not many and not small; 16 stand for a layer's.
        masters = [torch.zeros(elements // 16, dtype=wide, device=comm.device) for _ in range(16)]
        optimizer = job.optimizer([{"params": masters, "decay": True}])
        (seconds,) = _repeated(partial(_update, comm, optimizer, masters), steps)
        rows.append((elements, seconds))
    return rows


def _update(comm: Comm, optimizer: Optimizer, masters: Sequence[torch.Tensor]) -> list[float]:
    grads = [torch.ones_like(m) for m in masters]
    before = comm.clock.computed
    with comm.clock.counting(), comm.clock.work():
        squared_norm([grads], lambda tensors: l2norm_aten(tensors)[0])
        torch._foreach_mul_(grads, 0.5)
        for master, grad in zip(masters, grads):
            master.grad = grad
        optimizer.step()
    return [comm.clock.computed - before]


def attention_seconds(
    comm: Comm, dtype: torch.dtype, spec: ModelSpec, lengths: Sequence[int], steps: int
) -> list[tuple[int, int, int, float, float]]:
    """(length, heads, head_dim, forward, backward) of causal attention over one sequence."""
    rows = []
    for length in lengths:
        forward, backward = _repeated(partial(_attention, comm, dtype, spec, length), steps)
        rows.append((length, spec.num_heads, spec.head_dim, forward, backward))
    return rows


def _attention(comm: Comm, dtype: torch.dtype, spec: ModelSpec, length: int) -> list[float]:
    q, k, v = (
        torch.randn(1, length, n, spec.head_dim, dtype=dtype, device=comm.device, requires_grad=True)
        for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    with comm.clock.counting(), comm.clock.work():
        at = [comm.clock.computed]
        out, _ = attention(q, k, v)
        comm.clock.settle()
        at.append(comm.clock.computed)
        torch.autograd.backward(out, torch.ones_like(out))
        comm.clock.settle()
        at.append(comm.clock.computed)
    return [at[1] - at[0], at[2] - at[1]]


def visit_seconds(
    comm: Comm, dtype: torch.dtype, spec: ModelSpec, lengths: Sequence[int], steps: int
) -> list[tuple[int, int, int, float, float]]:
    """(queries, heads, head_dim, forward, backward): what one more block of keys and values costs in the ring beside
    its FLOPs (launches, merging, packing). The same keys pass in one block and in several."""
    rows = []
    kv, repeat = spec.num_kv_heads, spec.queries_per_kv
    attention = BlockAttention(tile_kernel(comm.device), key_heads([i // repeat for i in range(spec.num_heads)]))
    for length in lengths:
        cuts = [VISITS, 1] if length >= VISITS else []
        q, grad = (torch.randn(1, length, spec.num_heads, spec.head_dim, dtype=dtype, device=comm.device) for _ in "qg")
        k, v = (torch.randn(1, length, kv, spec.head_dim, dtype=dtype, device=comm.device) for _ in "kv")
        found: dict[int, list[float]] = {}
        for count in cuts:
            blocks = [(i * length // count, (i + 1) * length // count) for i in range(count)]
            found[count] = _repeated(partial(_visit, comm, attention, (q, k, v, grad), blocks), steps)
        if found:
            extra = [max((a - b) / (VISITS - 1), 1e-9) for a, b in zip(found[VISITS], found[1])]
            rows.append((length, spec.num_heads, spec.head_dim, extra[0], extra[1]))
    return rows


def _visit(
    comm: Comm, attention: BlockAttention, tensors: tuple[torch.Tensor, ...], blocks: Sequence[tuple[int, int]]
) -> list[float]:
    """Seconds (forward, backward) of attention to keys that come in ``blocks``, all visible to all queries."""
    q, k, v, grad = tensors
    tiles = [[(None, Tile(0, q.shape[1], 0, b - a, FULL, b - a))] for a, b in blocks]
    with comm.clock.counting(), comm.clock.work():
        at = [comm.clock.computed]
        out, lse = accumulators(q)
        for (a, b), mine in zip(blocks, tiles, strict=True):
            pair = torch.stack((k[:, a:b], v[:, a:b]))  # as it is sent on
            attention.forward(q, pair[0], pair[1], mine, out, lse)
        comm.clock.settle()
        at.append(comm.clock.computed)
        dq, delta = torch.zeros_like(out), attention.kernel.delta(grad, out)
        for (a, b), mine in zip(blocks, tiles, strict=True):
            pair = torch.stack((k[:, a:b], v[:, a:b]))
            sums = torch.zeros(pair.shape, dtype=out.dtype, device=out.device)
            attention.backward(grad, q, pair[0], pair[1], out, lse, mine, (dq, sums[0], sums[1]), delta)
            sums += torch.stack((sums[0], sums[1]))  # the sum so far arrives, and leaves
        comm.clock.settle()
        at.append(comm.clock.computed)
    return [at[1] - at[0], at[2] - at[1]]
