"""Mixtures of experts without values: as many tokens go everywhere as are expected, on every rank alike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.dry_run.products import weight_gradient
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.ops import KernelPlan, gemm
from hetero_megatron.ops.bind import make_function
from hetero_megatron.ops.grouped_gemm import bind_grouped_gemm
from hetero_megatron.ops.moe_permute import unpermute
from hetero_megatron.ops.spec import ATEN, Kernel, wide
from hetero_megatron.parallel.experts import ExpertExchange, Routes
from hetero_megatron.plans.routing import layer_loads

if TYPE_CHECKING:
    from hetero_megatron.training.runtime import Runtime


class ExpectedRoutes(Routes):
    """``to``: tokens for each member of the group; ``come``: from each."""

    def __init__(self, to: list[int], come: list[int], *args: Any) -> None:
        self._to, self._come = to, come
        super().__init__(*args)

    def read(self, counts: torch.Tensor) -> list[int]:
        return [*self._to, *self._come, *[0] * (len(counts) - len(self._to) - len(self._come))]


def expect_routing(runtime: Runtime) -> None:
    """Let the mixture-of-experts layers of a model under fake tensors route as many tokens as are expected."""
    spec, rank = runtime.here.spec, runtime.comm.rank
    if spec.moe is None:
        return
    loads = layer_loads(spec, runtime.here.stage, True, islands=runtime.here.plan.islands)

    def sort(
        chosen: torch.Tensor, experts: int, ends: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = chosen.new_empty(round(loads.of[rank].rows))
        return rows, torch.full_like(chosen, -1), chosen.new_empty(experts) if ends is None else ends

    for layer in runtime.stage_model.module.layers():
        if not isinstance(layer.mlp, MoEMLP):
            continue
        layer.mlp.experts.sort = sort
        if isinstance(layer.mlp.dispatch, ExpertExchange):
            for exchange, hop in zip(layer.mlp.dispatch.hops, loads.hops):
                ranks = exchange.ways.group.ranks
                sent = [round(hop.copies.get((rank, r), 0.0)) for r in ranks]
                received = [round(hop.copies.get((r, rank), 0.0)) for r in ranks]
                exchange.find_routes = partial(ExpectedRoutes, sent, received)


def with_expected_rows(kernels: KernelPlan) -> KernelPlan:
    """The same kernels, but those that read how many rows an expert has take them to be alike: what they make and
    allocate is as large."""
    product = Kernel("grouped_gemm", "shapes", ATEN, _forward, None, parts={"input": _input, "weight": _weight})
    sums = Kernel("moe_unpermute", "shapes", ATEN, unpermute, _unpermute_backward)
    spec = kernels.registry.spec("moe_unpermute")
    gradients = kernels.weight_gradients
    expected = kernels.with_calls({
        "grouped_gemm": bind_grouped_gemm(product, gradients), "moe_unpermute": make_function(spec, sums).apply,
    })  # fmt: skip
    return expected


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> Any:
    return (x.new_empty(x.shape[0], weight.shape[1]),)


def _input(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[2])


def _weight(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    if into is None:
        return dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1])
    if len(into):  # one expert's product stands for all: they are made one after the other
        rows = slice(0, dy.shape[0] // len(into))
        narrow = into.dtype != dy.dtype
        (weight_gradient if narrow else gemm.weight_gradient)(dy[rows], x[rows], into[0], beta)
    return into


def _unpermute_backward(
    dout: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = dout[rows].to(wide(y.dtype))
    torch.linalg.vecdot(gathered, y.to(gathered.dtype))
    return gathered.to(y.dtype), torch.zeros_like(weights)
