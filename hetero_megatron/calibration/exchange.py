"""What a chip takes to pack, add up and unpack gradients and parameters in exchanges between replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_megatron.calibration.layers import Job, train
from hetero_megatron.calibration.measure import robust_fit
from hetero_megatron.calibration.pipelines import Run
from hetero_megatron.parallel.grad_sync.exchange import HopExchange

RATES = ("pack_beta", "add_beta", "unpack_beta", "exchange_seconds")
Phase = list[float]  # of one call: bytes packed, added and unpacked, messages; and its seconds


def observe_exchange(run: Run, job: Job, steps: int) -> list[Phase]:
    """Take part in a run of replicas; every rank of the job calls it. What this rank's chip did, bucket by bucket."""
    runtime = job.runtime(run)
    if runtime is None:
        return []
    hops, phases = [hop for exchange in runtime.sync.exchanges for hop in exchange.hops], list[Phase]()
    for hop in hops:
        hop.runs = None  # as between replicas of unlike degrees: replicas of one chip each would copy next to nothing
    train(runtime, run, run.plan.global_batch_size)  # warms up
    for hop in hops:
        _time_phases(hop, job.dtype, phases)
    for _ in range(steps):
        train(runtime, run, run.plan.global_batch_size)
    return phases


def _time_phases(exchange: HopExchange, dtype: torch.dtype, phases: list[Phase]) -> None:
    """Note what each call of ``exchange`` computes."""
    clock, gradient_bytes = exchange.group.comm.clock, torch.promote_types(dtype, torch.float32).itemsize

    def timed(name: str, *moved: float) -> None:
        plain = getattr(exchange, name)

        def call(*arguments: object) -> object:
            clock.settle()
            seconds_before = clock.computed
            out = plain(*arguments)
            clock.settle()
            phases.append([*moved, clock.computed - seconds_before])
            return out

        setattr(exchange, name, call)

    timed("start", exchange.given * gradient_bytes, 0, 0, 1)
    timed("finish", 0, (exchange.taken + exchange.size) * gradient_bytes, 0, exchange.group.size)
    timed("start_back", exchange.taken * dtype.itemsize, 0, 0, 1)
    timed("finish_back", 0, 0, exchange.given * dtype.itemsize, 1)


def fit_phases(phases: Sequence[Phase]) -> tuple[dict[str, float], float]:
    """``RATES`` of one chip type, and the relative spread around them."""
    values, spread = robust_fit([row[:-1] for row in phases], [row[-1] for row in phases], relative=False)
    return dict(zip(RATES, values, strict=True)), spread
