"""A rank whose copy of a weight differs, or whose kernel computes otherwise, is named and ends the run."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hetero_megatron.ops import Signature, torch_registry
from hetero_megatron.ops.conformance.run import wrong_kernels
from hetero_megatron.ops.spec import REFERENCE
from hetero_megatron.training.failure import ReplicaCheck, differing
from tests.support.programs import inside, start_ranks

RUN = ["--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "6"]
RUN += ["--train-iters", "3", "--lr", "1e-3", "--log-interval", "1"]
FLAG = "--check-weight-hash-across-dp-replicas-interval"
CPU = torch.device("cpu")


def spoil_rank_2() -> None:
    """In the process of rank 2: a bit of one copy flips after the second step."""
    check = ReplicaCheck.after_step

    def after_step(self: ReplicaCheck, step: int) -> None:
        if os.environ["RANK"] == "2" and step == 2:
            with torch.no_grad():
                self.runtime.sync.params["model.layers.3.mlp.up_proj.weight"][5, 7].mul_(1 + 2**-20)
        check(self, step)

    ReplicaCheck.after_step = after_step  # type: ignore[method-assign]


def test_the_rank_whose_copy_differs_is_named() -> None:
    ranks = start_ranks(3, [*RUN, FLAG, "2"], before=spoil_rank_2)
    told = [rank.communicate(240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2, 2], told
    for _, err in told:
        assert "copies of weights differ after step 2 on rank 2, unlike on most that hold them" in err, err
        assert "model.layers.3.mlp.up_proj.weight" in err and err.count("error: ") == 1


@pytest.mark.slow
def test_equal_copies_are_no_trouble_under_unlike_cuts() -> None:
    for cut in (["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]):
        ranks = start_ranks(2, [*RUN, *cut, FLAG, "1", "--bf16"])
        told = [rank.communicate(240) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], told


def test_most_ranks_are_right_and_two_alone_are_both_named() -> None:
    assert differing((0, 1, 2), [{"a": "x"}, {"a": "y"}, {"a": "x"}]) == {"a": ([1], [0, 2])}
    assert differing((4, 7), [{"a": "x"}, {"a": "y"}]) == {"a": ([4, 7], [])}
    assert differing((0, 1), [{"a": "x", "b": "1"}, {"a": "x"}]) == {}


def test_a_kernel_that_computes_otherwise_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = torch_registry()
    right = registry.kernel("rms_norm", "aten")
    wrong = replace(right, forward=lambda x, w, eps: (right.forward(x, w, eps)[0] * 1.01, right.forward(x, w, eps)[1]))
    monkeypatch.setitem(registry._kernels["rms_norm"], "aten", wrong)
    monkeypatch.setattr("hetero_megatron.platform.plugins.torch_registry", lambda: registry)
    words = [*RUN, "--kernels", "rms_norm=aten"]
    _, err = inside(words, code=2)
    assert "kernel = rms_norm:aten: computes otherwise than its operator's definition on 1 rank of 1 (0)" in err
    assert "--no-kernel-check" in err and err.count("error: ") == 1
    out, _ = inside([*words, "--no-kernel-check"])
    assert "kernels checked" not in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_built_in_kernels_pass_at_start_and_change_no_random_numbers(dtype: torch.dtype) -> None:
    registry = torch_registry()
    before = torch.get_rng_state()
    for kernel in registry:
        signature = Signature(kernel.op, "cpu", dtype, "cpu", features=kernel.capability.features)
        if kernel.kind != REFERENCE and not kernel.reasons(signature):
            assert wrong_kernels([(registry.spec(kernel.op), kernel, signature)], CPU, lambda: None) == {}, kernel
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_gradients_and_exceptions_are_found_at_start() -> None:
    registry = torch_registry()
    right, spec = registry.kernel("swiglu", "aten"), registry.spec("swiglu")
    assert right.backward is not None
    backward = right.backward
    signature = Signature("swiglu", "cpu", torch.float32, "cpu")

    def fails(*_: object) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no such image for this chip")

    for wrong, said in (
        (replace(right, backward=lambda *args: tuple(-x for x in backward(*args))), "gradient of gate: "),
        (replace(right, forward=fails), "raised RuntimeError: no such image for this chip"),
    ):
        found = wrong_kernels([(spec, wrong, signature)], CPU, lambda: None)
        assert said in found["swiglu:aten"], found
