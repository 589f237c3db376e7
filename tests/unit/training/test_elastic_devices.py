"""What devices an elastic run takes, and how it abandons the groups of their libraries."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_megatron.comm.islands import Endpoint, Islands
from hetero_megatron.errors import UserError
from hetero_megatron.platform import CPU, Platform
from hetero_megatron.training.elastic_devices import check_abandonable, prepare

NVIDIA = Endpoint("nvidia", "NVIDIA", "NVIDIA A100", "nccl", "", "cpu:gloo,cuda:nccl", (), "2.13.0")
ASCEND = Endpoint("ascend", "Huawei", "Ascend910B2", "hccl", "", "cpu:gloo,npu:hccl", (), "2.13.0", aborts=False)
PROCESSOR = Endpoint("cpu", "any", "x86_64", "gloo", "", "gloo", (), "2.13.0")


def test_libraries_that_cannot_abandon_groups_are_refused_by_name() -> None:
    for fine in ([NVIDIA, NVIDIA, PROCESSOR], [PROCESSOR, PROCESSOR], [NVIDIA, ASCEND]):  # one Ascend has no group
        check_abandonable(Islands(fine))
    with pytest.raises(UserError, match=r"groups of hccl, by which ranks 1-2 \(ascend\) reach each other") as refused:
        check_abandonable(Islands([NVIDIA, ASCEND, ASCEND]))
    assert refused.value.field == "--elastic"
    both = [replace(NVIDIA, direct=("flagcx",)), replace(ASCEND, direct=("flagcx",))]
    with pytest.raises(UserError, match="groups of flagcx, by which ranks 0 and 1 reach each other"):
        check_abandonable(Islands(both))
    check_abandonable(Islands([replace(one, transport="bridge") for one in both]))


class Watched(CPU):
    abort_settings = {"WATCHED_ERRORS": "0"}


def test_the_library_is_told_to_leave_lost_peers_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(torch.device("cpu"), "gloo", Watched())
    monkeypatch.delenv("WATCHED_ERRORS", raising=False)
    prepare(platform)
    prepare(platform)
    monkeypatch.setenv("WATCHED_ERRORS", "1")
    with pytest.raises(UserError, match="would handle lost ranks itself") as refused:
        prepare(platform)
    assert (refused.value.field, refused.value.value) == ("WATCHED_ERRORS", "1")


def test_all_communicators_are_aborted_together() -> None:
    called: list[str] = []

    def group(name: str, together: bool) -> Any:
        calls = ("abort", "_group_start", "_group_end") if together else ("abort",)
        backend = SimpleNamespace(**{call: lambda call=call: called.append(f"{name} {call}") for call in calls})
        return SimpleNamespace(_get_backend=lambda device: backend)

    CPU().abort([group("a", True), group("b", True)])
    assert called == ["a _group_start", "a abort", "b abort", "a _group_end"]
    called.clear()
    CPU().abort([group("a", False)])
    CPU().abort([])
    assert called == ["a abort"]
