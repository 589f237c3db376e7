"""Threads that move data over the network are on the CPUs near its card: Linux' own files, in a folder of the test."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hetero_megatron.comm.bridge import Bridge
from hetero_megatron.environment.network import cpu_list, network_cpus, on_cpus

HERE = sorted(os.sched_getaffinity(0))


def card(folder: Path, text: str) -> Path:
    (folder / "eth0" / "device").mkdir(parents=True)
    (folder / "eth0" / "device" / "local_cpulist").write_text(text)
    return folder


LISTS: dict[str, set[int]] = {
    "0-3,8,10-11\n": {0, 1, 2, 3, 8, 10, 11}, "5": {5}, "": set(), "\n": set(), "0-x,7": {7}, "3-1": set(),
}  # fmt: skip


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_cpus(text: str) -> None:
    assert cpu_list(text) == LISTS[text]


@pytest.mark.parametrize("text", ["", "100000", "0-99999", "nonsense", "\x00"])
def test_nothing_is_pinned_where_nothing_is_gained(text: str, tmp_path: Path) -> None:
    """No list, CPUs that this process may not use, all of them, and what is no list."""
    assert network_cpus("eth0", card(tmp_path, text)) == frozenset()


def test_interfaces_without_a_card(tmp_path: Path) -> None:
    assert network_cpus("", tmp_path) == network_cpus("lo", tmp_path) == network_cpus("../..", tmp_path) == frozenset()
    assert network_cpus("lo") == frozenset()


@pytest.mark.skipif(len(HERE) < 2, reason="one CPU is near to everything")
def test_threads_of_the_bridge_start_near_the_card(tmp_path: Path) -> None:
    near = network_cpus("eth0", card(tmp_path, f"{HERE[-1]},99999"))
    assert near == {HERE[-1]}
    seen: list[set[int]] = []

    class Copies:
        def stream(self) -> None:
            seen.append(os.sched_getaffinity(0))
            started.set()

    started = threading.Event()
    bridge = Bridge([], Copies(), 1, near_network=lambda: on_cpus(near))  # type: ignore[arg-type]
    bridge._transfer = lambda *_: None  # type: ignore[assignment, method-assign, return-value]
    bridge._channel(0, True, 0)
    assert started.wait(10) and seen == [near]
    assert os.sched_getaffinity(0) == set(HERE)
    bridge.close()
