"""Seconds of routed experts outside of pipelines: by experts and rows, and by ranks and tokens that they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.measure import LEAST, repeated, robust_fit
from hetero_megatron.calibration.operators import timed
from hetero_megatron.calibration.pipelines import one_rank
from hetero_megatron.comm import Group
from hetero_megatron.comm.work import Work
from hetero_megatron.model.moe import Experts
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.gemm import WeightKernel
from hetero_megatron.parallel.experts import ExpertExchange, Receivers, Routes
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.spec import ModelSpec, Share, shares
from hetero_megatron.spec.flops import layers_by_kind

MEMBERS = (2, 4)  # ranks of the groups that exchange tokens
ExpertTables = tuple[list[list[float | str]], float]  # rows as in the rates, and their spread


def measure_experts(job: Job, spec: ModelSpec, tp: Sequence[int], tokens: int, calls: int) -> ExpertTables:
    """What a layer of routed experts takes more per expert, row, rank of its group, token sent or received, and
    exchange, for each TP degree's share of columns. Nothing for a dense model.

    Args:
        tokens: of a micro-batch.
    """
    if spec.moe is None:
        return [], 0.0
    cases = _exchanges(job, spec, tokens)
    amounts = [[1.0, float(members), 2.0 * sent] for members, _, sent in cases]
    # A layer without a group exchanges nothing, so what any exchange takes counts, too.
    (once, *exchanged), varied = _fitted(amounts, [call for _, call, _ in cases], calls)
    rows, spread = list[list[float | str]](), varied
    kernels = job.kernels_of(one_rank(job.comm.rank, spec), spec, False)
    for share in dict.fromkeys(shares(spec, (1,) * degree)[0] for degree in tp):
        columns, count = share.expert_ffn[1] - share.expert_ffn[0], spec.moe.num_experts
        fewer_experts = [max(spec.moe.top_k, count // n) for n in (2, 4)]
        points = dict.fromkeys(
            [(count, tokens), (count, tokens // 4), (fewer_experts[0], tokens), (fewer_experts[1], tokens // 4)]
        )
        (_, *per_amount), varied = _fitted(  # every layer calls its experts, also one without rows
            [[1.0, float(experts), float(n * spec.moe.top_k)] for experts, n in points],
            [partial(_experts, job, spec, replace(share, experts=(0, e)), n, kernels) for e, n in points], calls,
        )  # fmt: skip
        seconds = [s for pair in (*per_amount, *exchanged, once) for s in pair]
        rows += [[model_fingerprint(model), columns, *seconds] for model, _ in layers_by_kind(spec)]
        spread = max(spread, varied)
    return rows, spread


def _fitted(
    amounts: Sequence[Sequence[float]], measures: Sequence[Callable[[], Sequence[float]]], calls: int
) -> tuple[list[tuple[float, float]], float]:
    """(seconds (forward, backward) of one of each amount; their spread)."""
    measured = [repeated(measure, calls) for measure in measures]
    forward, backward = (robust_fit(amounts, [pair[way][0] for pair in measured])[0] for way in (0, 1))
    fitted = [(max(a, LEAST), max(b, LEAST)) for a, b in zip(forward, backward, strict=True)]
    return fitted, max(s for x in measured for _, s in x)


def _experts(job: Job, spec: ModelSpec, share: Share, tokens: int, kernels: KernelPlan) -> list[float]:
    """Seconds (forward, backward) of so many experts to which all of ``tokens`` go, each to different ones. Weight
    gradients are added to sums, as in a step."""
    assert spec.moe is not None
    device, (_, last) = job.comm.device, share.experts
    experts = Experts(spec, share, kernels).to(device, job.dtype)
    for parameter in experts.parameters():
        torch.nn.init.constant_(parameter, 0.01)
        total = torch.zeros_like(parameter, dtype=torch.promote_types(job.dtype, torch.float32))
        kernels.weight_gradients.assign((parameter,), partial(_add, total))
    k = spec.moe.top_k
    numbers = torch.arange(tokens, device=device)[:, None] + torch.arange(k, device=device)
    chosen = torch.where(torch.arange(k, device=device) < last, numbers % last, -1)
    x = torch.randn(tokens, spec.hidden_size, dtype=job.dtype, device=device, requires_grad=True)
    weights = torch.rand(tokens, k, dtype=torch.promote_types(job.dtype, torch.float32), device=device)
    weights.requires_grad_()
    grad, outs = torch.randn_like(x), list[torch.Tensor]()
    return timed(job.comm.clock, lambda: outs.append(experts(x, weights, chosen)), lambda: outs[0].backward(grad))


def _add(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, product: WeightKernel) -> None:
    product(dy, x, total, 1.0)


@dataclass(frozen=True)
class _Mirror(Group):
    """Ranks that send what they get: this one is all of them. Transfers are no work of the chip."""

    def exchange(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Work:
        clock = self.comm.clock
        clock.pause()
        for a, b in zip(send, receive, strict=True):
            if a is not b:
                _copy(a, b)
        clock.resume()
        return Work(self.comm, None, None, (), send)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type != "cpu":
        target.copy_(source)
    elif source.numel():  # not by an operator, which an emulated clock would count
        a, b = (x.detach().contiguous().view(torch.uint8).numpy() for x in (source, target))
        b[...] = a


def _exchanges(
    job: Job, spec: ModelSpec, tokens: int
) -> list[tuple[int, Callable[[], Sequence[float]], float]]:
    """(ranks, a call that exchanges tokens between them, how many one of them sends) of some sizes."""
    moe, first = spec.moe, job.comm.rank
    assert moe is not None
    cases = list[tuple[int, Callable[[], Sequence[float]], float]]()
    for members in MEMBERS:
        ranks = tuple(range(first, first + members))
        ends = [i * moe.num_experts // members for i in range(members + 1)]
        expert_members = tuple(ExpertMember((r,), (a, b), (1,)) for r, a, b in zip(ranks, ends, ends[1:]))
        receivers = Receivers(ExpertGroup(expert_members), moe.num_experts, (), job.comm.device)
        ways = receivers.straight(_Mirror(job.comm, ranks, None))
        alike = (max(ways.experts),) * members  # what a rank sends is what it gets, counts too
        exchange = ExpertExchange([replace(ways, takes=ways.gives, experts=alike)], _Same())
        for n in (tokens, max(1, tokens // 4)):
            generator = torch.Generator().manual_seed(0)
            scores = torch.rand(n, moe.num_experts, generator=generator).to(job.comm.device)
            chosen = scores.topk(moe.top_k, dim=-1).indices
            routes = Routes(exchange.ways, chosen)
            sent = float(sum(routes.sent))
            cases.append((members, partial(_exchange, job, spec, exchange, chosen), sent))
    return cases


class _Same:
    """Experts that do nothing."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor | None
    ) -> torch.Tensor:
        return x


def _exchange(job: Job, spec: ModelSpec, exchange: ExpertExchange, chosen: torch.Tensor) -> list[float]:
    x = torch.randn(len(chosen), spec.hidden_size, dtype=job.dtype, device=job.comm.device, requires_grad=True)
    weight_dtype = torch.promote_types(job.dtype, torch.float32)
    weights = torch.rand(chosen.shape, dtype=weight_dtype, device=job.comm.device, requires_grad=True)
    grad, outs = torch.randn_like(x), list[torch.Tensor]()
    return timed(job.comm.clock, lambda: outs.append(exchange(x, weights, chosen)()), lambda: outs[0].backward(grad))
