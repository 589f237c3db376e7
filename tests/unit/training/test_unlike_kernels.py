"""Ranks of one stage on unlike chips: which kernels may differ among them, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.ops.spec import TRITON, VENDOR
from hetero_megatron.training.kernels import agree_on_kernels

KERNELS = [("flash", VENDOR, False), ("cudnn", VENDOR, False), ("own_state", VENDOR, True), ("triton", TRITON, False)]


def agree(mine: dict[str, str], theirs: dict[str, str]) -> None:
    """On rank 0 of a stage with an A100 and an H100, which resolved operators so."""

    def kernels(op: str) -> list[Any]:
        return [SimpleNamespace(provider=name, kind=kind, private=private) for name, kind, private in KERNELS]

    def gather_objects(summary: Any, kind: Any) -> list[Any]:
        return [summary, (*summary[:2], theirs, "other digest", "other summary")]

    plan = SimpleNamespace(
        registry=SimpleNamespace(kernels=kernels), summary=lambda: "its kernels", why=list,
        providers=lambda: mine, digest=lambda: "digest",
    )  # fmt: skip
    stage = SimpleNamespace(kernels=())
    here = SimpleNamespace(
        place=SimpleNamespace(pipeline=0, stage=0),
        plan=SimpleNamespace(pipelines=[SimpleNamespace(stages=[stage])]),
    )
    world = SimpleNamespace(ranks=(0, 1), gather_objects=gather_objects)
    runtime: Any = SimpleNamespace(
        here=here, world=world, stage_model=SimpleNamespace(kernels=plan, dtype="torch.bfloat16"),
        comm=SimpleNamespace(rank=0),
    )  # fmt: skip
    agree_on_kernels(runtime)


def test_vendors_attention_may_differ_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    agree({"attention": "flash", "gemm": "aten"}, {"attention": "cudnn", "gemm": "aten"})
    notice = "notice: unlike chips of pipeline 0 stage 0 have unlike kernels for attention: "
    assert capsys.readouterr().out.splitlines() == [
        f"{notice}rank 0 uses flash, rank 1 cudnn", "kernels of pipeline 0 stage 0 (digest): its kernels",
    ]  # fmt: skip
    agree({"attention": "flash"}, {"attention": "flash"})
    assert "notice" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("op", "mine", "theirs"),
    [("attention", "flash", "own_state"), ("attention", "triton", "cudnn"), ("rmsnorm", "aten", "triton")],
)
def test_what_keeps_a_state_of_its_own_or_is_no_vendors_attention_may_not(op: str, mine: str, theirs: str) -> None:
    with pytest.raises(UserError, match=f"ranks 0 and 1 of one stage resolved {op} to different providers"):
        agree({op: mine}, {op: theirs})
