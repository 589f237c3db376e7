"""Recomputation gives the gradients of torch's own, runs no more than it must, and leaves nothing behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero_megatron.parallel.recompute import run_again_in_backward
from tests.support.paths import ROOT


class Block(nn.Module):
    """Products, a branch, views, an output that is used twice, and what it counts of its own calls."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(depth))
        self.calls: list[str] = []

    def forward(self, x: torch.Tensor, scale: torch.Tensor, tables: dict[str, torch.Tensor]) -> torch.Tensor:
        y = x
        for linear in self.linears:
            self.calls.append("linear")
            y = torch.tanh(linear(y) * tables["table"]) + y.transpose(0, 1).softmax(-1).transpose(0, 1)
        y = y * scale
        self.calls.append("sum")
        return y + x  # saves nothing


def gradients(block: Block, wrap: str, x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    tables = {"table": torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)}
    block.zero_grad()
    y = x * 2
    for _ in range(2):  # one call's output is the next one's input
        if wrap == "ours":
            y = run_again_in_backward(block, y, scale, tables)
        elif wrap == "torch":
            y = checkpoint(block, y, scale, tables, use_reentrant=False)
        else:
            y = block(y, scale, tables)
    y.square().sum().backward()
    return [y.detach(), x.grad, scale.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]


@given(rows=st.integers(1, 5), width=st.integers(1, 6), depth=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_gradients_are_those_without_it_and_of_torch(rows: int, width: int, depth: int, seed: int) -> None:
    torch.manual_seed(seed)
    block, x, scale = Block(width, depth), torch.randn(rows, width).double(), torch.randn(width).double()
    found = {wrap: gradients(block, wrap, x, scale) for wrap in ("none", "ours", "torch")}
    for mine, plain, theirs in zip(found["ours"], found["none"], found["torch"]):
        assert torch.equal(mine, plain)
        assert torch.equal(mine, theirs)


def test_what_saves_nothing_at_the_end_does_not_run_again() -> None:
    block = Block(4, 2)
    x, scale = torch.randn(3, 4).double(), torch.randn(4).double()
    for wrap in ("ours", "torch"):
        block.calls = []
        gradients(block, wrap, x, scale)
        assert block.calls == 2 * ["linear", "linear", "sum"] + 2 * ["linear", "linear"], wrap


def test_forward_keeps_only_inputs_and_backward_nothing() -> None:
    inside: list[weakref.ref[torch.Tensor]] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        middle = x.exp()
        inside.append(weakref.ref(middle))
        return middle.sin()  # saves its input

    x = torch.randn(8, requires_grad=True)
    gc.disable()  # references alone must let go
    try:
        out = run_again_in_backward(run, x)
        assert [r() is None for r in inside] == [True]
        out.sum().backward()
        assert [r() is None for r in inside] == [True, True]
        start = weakref.ref(out)
        del out
        assert start() is None
    finally:
        gc.enable()
    torch.testing.assert_close(x.grad, x.detach().exp().cos() * x.detach().exp())


def test_without_gradients_it_is_a_plain_call() -> None:
    with torch.no_grad():
        assert not run_again_in_backward(torch.exp, torch.ones(2, requires_grad=True)).requires_grad


def test_written_inputs_and_other_tensors_are_noticed() -> None:
    x = torch.randn(4, requires_grad=True)
    middle = x * 2
    out = run_again_in_backward(torch.exp, middle)
    middle.detach().zero_()
    with pytest.raises(AssertionError, match="written"):
        out.sum().backward()

    turns = iter([True, False])
    out = run_again_in_backward(lambda x: x.sin() if next(turns) else x[:2].sin(), x)
    with pytest.raises(AssertionError, match="other tensors"):
        out.sum().backward()


@pytest.mark.slow
def test_it_needs_no_compiler() -> None:
    code = (
        "import sys, torch; from hetero_megatron.parallel.recompute import run_again_in_backward as run;"
        "x = torch.ones(2, requires_grad=True); run(torch.exp, x).sum().backward();"
        "assert x.grad is not None; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
