"""One rank of a plan, alone, with fake tensors: what it holds and sends in any step but the first. On any CPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.data.batch import Batch
from hetero_megatron.dry_run.allocator import MemoryTracker
from hetero_megatron.dry_run.expert_layers import expect_routing
from hetero_megatron.dry_run.repeat import RepeatingExecutor
from hetero_megatron.parallel.divided_weights import DividedWeights
from hetero_megatron.parallel.host_adam import check_offload
from hetero_megatron.parallel.optimizer import Optimizer
from hetero_megatron.parallel.outer_steps import OuterSteps
from hetero_megatron.plans import locate
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.training.config import OptimizerConfig, RunConfig
from hetero_megatron.training.kernels import shape_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory
from hetero_megatron.utils.text import rank_ranges

if TYPE_CHECKING:
    from hetero_megatron.parallel.host_memory import HostMemory


@dataclass(frozen=True)
class DryRun:
    """What rank ``rank`` does in one step.

    Attributes:
        parameters, optimizer: bytes of local weights (of divided ones, those that are whole at once), and of owned
            masters (where they are copies) and moments.
        offload: the optimizer's are in the host's memory, and not part of ``peak``.
        activations: most bytes of activations in the host's memory at once.
        peak: most bytes of live tensors at once, the optimizer's state included from the beginning of the step on.
        sent: bytes by purpose (``pipeline``, ``context parallel``, ``tensor parallel``, ``gradients``, ``weights``) and
            destination rank; routed tokens, of which there are as many as expected, count with the second or third.
        seconds: that the dry run took.
    """

    rank: int
    parameters: int
    optimizer: int
    offload: bool
    peak: int
    sent: Mapping[str, Mapping[int, int]]
    seconds: float
    activations: int = 0


def run_rank(config: RunConfig, rank: int) -> DryRun:
    """Build the rank's part of the plan and run one nominal step, as it is once the moments are there."""
    start = time.perf_counter()
    check_offload(config.plan, config.optimizer.name, config.dtype)
    comm = FakeComm(rank, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as memory:
        comm.create_groups(config.compiled.groups)
        runtime = Runtime(
            config.compiled, comm, DTYPES[config.dtype], lambda _, box: torch.empty(box.shape),
            optimizer_factory(config.optimizer), kernels=shape_kernels(config, rank, DTYPES[config.dtype]),
            options=RuntimeOptions(logits_bytes=config.logits_bytes, balancing=config.balancing),
        )  # fmt: skip
        expect_routing(runtime)
        for hop in (hop for exchange in runtime.sync.all_exchanges for hop in exchange.hops):
            hop.fills = False  # hundreds of replicas would be as many fake operators in every bucket
        assert runtime.optimizer is not None
        offload = runtime.optimizer.offload
        if offload:
            memory.forget(master for masters in runtime.optimizer.masters for master in masters)
            memory.forget(_kept_rows(runtime))
        gathered = _observed(runtime.divided, memory)
        activations = runtime.stage_model.offloaded
        host = _host_memory(activations.host if activations is not None else None, memory)
        _host_memory(runtime.stage_model.rows.memory if runtime.stage_model.rows is not None else None, memory)
        memory.peak = memory.live  # initial values are made, and brought into 8 bits, in the host's memory
        memory.host = offload
        _make_moments(runtime.optimizer.inner, config.optimizer)
        memory.host = False
        divided_names = runtime.divided.names if runtime.divided is not None else ()
        built = runtime.stage_model
        undivided = [p for n, p in built.module.named_parameters() if n not in divided_names]
        scales = [t for s in built.scales.values() for t in ([s] if isinstance(s, torch.Tensor) else s.tensors)]
        parameters = _bytes([*undivided, *scales, *(() if offload else _kept_rows(runtime))])
        size = config.plan.global_batch_size
        work = runtime.work(lambda indices: _batch(len(indices), config.plan.seq_length), 0, size)
        # Gradients wait for finish(), so that their bytes are told apart.
        RepeatingExecutor(runtime.executor, memory).run(work)
        peers, stage = set(runtime.here.unit.ranks), set(runtime.here.stage.ranks)
        sent = {
            "pipeline": {r: n for r, n in comm.sent_bytes.items() if r not in stage},
            "context parallel": {r: n for r, n in comm.sent_bytes.items() if r in stage - peers},
            "tensor parallel": {r: n for r, n in comm.sent_bytes.items() if r in peers},
        }
        sent_before = dict(comm.sent_bytes)
        grads = runtime.sync.finish()
        sent["gradients"] = _since(sent_before, comm.sent_bytes)
        sent_before = dict(comm.sent_bytes)
        runtime.optimizer.after_update = lambda: False
        runtime.optimizer.step(grads, 1.0)
        sent["weights"] = _since(sent_before, comm.sent_bytes)
        if runtime.outer is not None:
            sent["an outer step"] = _exchanged(runtime.outer, comm)
        optimizer = _optimizer_bytes(runtime)
    seconds = time.perf_counter() - start
    return DryRun(rank, parameters + max(gathered), optimizer, offload, memory.peak, sent, seconds, host())


def _exchanged(outer: OuterSteps, comm: FakeComm) -> dict[int, int]:
    """Exchange the first fragment; bytes sent to each rank."""
    sent_before = dict(comm.sent_bytes)
    outer.count([1.0] * len(outer.places))
    outer.updates = outer.outer.period - outer.outer.delay - 1
    for _ in range(outer.outer.delay + 1):
        outer.after_update()
    return _since(sent_before, comm.sent_bytes)


def _observed(divided: DividedWeights | None, memory: MemoryTracker) -> list[int]:
    """Bytes of divided weights that are whole, to be extended whenever that changes."""
    divided_bytes = [0]
    if divided is not None:
        sizes: dict[int, int] = {}

        def resized(part: torch.Tensor) -> None:
            memory.resized(part)
            sizes[id(part)] = part.untyped_storage().nbytes()
            divided_bytes.append(sum(sizes.values()))

        divided.observe(resized)
    return divided_bytes


def _host_memory(host: HostMemory | None, memory: MemoryTracker) -> Callable[[], int]:
    """Most bytes of host memory in use so far; they do not count in ``memory``."""
    if host is None:
        return lambda: 0

    def make(size: int) -> torch.Tensor:
        memory.host = True
        try:
            return torch.empty(size, dtype=torch.uint8)
        finally:
            memory.host = False

    host.make = make
    return lambda: host.peak


def _kept_rows(runtime: Runtime) -> list[torch.Tensor]:
    """What the rank keeps of weights that the stage divides, but the optimizer's masters."""
    assert runtime.optimizer is not None
    masters = {id(master) for masters in runtime.optimizer.masters for master in masters}
    parts = runtime.divided.parts.values() if runtime.divided is not None else ()
    return [x for part in parts for values in part.masters.values() for x in values if id(x) not in masters]


def _make_moments(optimizer: Optimizer | None, config: OptimizerConfig) -> None:
    """The states that the first step would make at its end: every later step has them from its beginning."""
    momentum = ("momentum_buffer",) if config.momentum or config.name == "muon" else ()
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        keys = momentum if config.name == "sgd" or "matrices" in group else ("exp_avg", "exp_avg_sq")
        for master in group["params"]:
            optimizer.state[master] = {"step": 0, **{key: torch.zeros_like(master) for key in keys}}


def _batch(rows: int, length: int) -> Batch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return Batch(tokens, tokens, torch.arange(length).expand(rows, length))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _optimizer_bytes(runtime: Runtime) -> int:
    """Moments, masters that are not the parameters' own memory, and the state of outer steps."""
    assert runtime.optimizer is not None
    inner = runtime.optimizer.inner
    states = inner.state.values() if inner is not None else ()
    moments = _bytes(t for state in states for t in state.values() if isinstance(t, torch.Tensor) and t.dim())
    exchanges, optimizer = runtime.sync.exchanges, runtime.optimizer
    pieces = [p for fragment in runtime.outer.fragments for p in fragment.pieces] if runtime.outer is not None else []
    moments += _bytes(t for p in pieces for t in (p.weights, p.momentum, p.lost) if t is not None)
    return moments + _bytes(
        master for e, masters in zip(exchanges, optimizer.masters, strict=True)
        for piece, master in zip(e.pieces, masters, strict=True) if not optimizer.in_place(e, piece)
    )  # fmt: skip


def _since(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    return {r: n - before.get(r, 0) for r, n in after.items() if n > before.get(r, 0)}


def format_dry_run(run: DryRun, config: RunConfig) -> str:
    """A table of what one rank holds and sends."""
    place = locate(config.plan, run.rank)
    lines = [
        f"rank {run.rank}: pipeline {place.pipeline}, stage {place.stage}, unit {place.unit}, TP rank {place.tp_rank}; "
        f"{config.dtype}, fake tensors, one step in {run.seconds:.1f} s",
        f"  weights          {format_bytes(run.parameters):>12}",
        f"  optimizer        {format_bytes(run.optimizer):>12}   "
        + ("moments and masters, in host memory" if run.offload else "moments, and masters where they are copies"),
        f"  peak             {format_bytes(run.peak):>12}   live tensors, optimizer "
        + ("not included" if run.offload else "included"),
    ]
    if run.activations:
        lines.append(f"  activations      {format_bytes(run.activations):>12}   at most in host memory, not included")
    for purpose, by_rank in run.sent.items():
        ranks = rank_ranges(tuple(sorted(by_rank)))
        to = f"   to ranks {ranks}" if by_rank else ""
        lines.append(f"  sent: {purpose:<17}{format_bytes(sum(by_rank.values())):>6}{to}")
    lines += _links(run, config.cluster)
    return "\n".join(lines)


def _links(run: DryRun, cluster: Cluster | None) -> list[str]:
    """Bytes by kind of link, where a cluster file says which node a rank is on."""
    if cluster is None:
        return []
    total: dict[str, int] = defaultdict(int)
    own_node = cluster.ranks[run.rank].node
    for by_rank in run.sent.values():
        for rank, count in by_rank.items():
            other_node = cluster.ranks[rank].node
            total["inside the node" if other_node == own_node else f"to {other_node}"] += count
    return [f"  link: {link_name:<16}{format_bytes(count):>7}" for link_name, count in sorted(total.items())]
