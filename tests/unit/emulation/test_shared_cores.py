"""Ranks that share a core: they compute one after the other, and have short time slices."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Event

import pytest

from hetero_megatron.emulation import Emulation
from hetero_megatron.emulation.clock import SLICE_NS, EmulatedClock
from hetero_megatron.emulation.core_lock import PATIENCE, CoreLock
from tests.support.burning import burn


@pytest.mark.skipif(platform.system() != "Linux", reason="time slices of a thread: Linux")
def test_ranks_with_emulated_clocks_have_short_time_slices() -> None:
    number = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
    if number is None or tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 12):
        pytest.skip("time slices of a thread: Linux 6.12")
    found = []

    def in_a_thread() -> None:
        EmulatedClock(lambda: 1.0)
        attributes = ctypes.create_string_buffer(56)
        assert ctypes.CDLL(None).syscall(number, 0, attributes, 56, 0) == 0  # sched_getattr
        found.append(struct.unpack("IIQiIQQQ", attributes.raw[:48]))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert [(policy, nice, ns) for _, policy, _, nice, _, ns, _, _ in found] == [
        (0, os.getpriority(os.PRIO_PROCESS, 0), SLICE_NS)
    ]


def test_ranks_of_a_core_compute_one_after_the_other(tmp_path: Path) -> None:
    computing, most = [], []

    def rank() -> None:
        clock = EmulatedClock(lambda: 0.5, core=CoreLock(tmp_path / "core"))
        for _ in range(20):
            with clock.counting(), clock.work():
                computing.append(1)
                most.append(len(computing))
                burn(0.001)
                computing.pop()

    ranks = [threading.Thread(target=rank) for _ in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert len(most) == 60 and max(most) == 1


def test_a_message_does_not_wait_for_another_rank_to_compute(tmp_path: Path) -> None:
    other = CoreLock(tmp_path / "core")
    other.acquire()
    clock, messages, computes = EmulatedClock(lambda: 0.5, core=CoreLock(tmp_path / "core")), Event(), Event()

    def rank() -> None:
        with clock.counting():
            clock.pause()  # a transfer is started
            clock.resume()
            messages.set()
            with clock.work():
                computes.set()

    thread = threading.Thread(target=rank)
    thread.start()
    assert messages.wait(60)
    assert not computes.wait(3 * PATIENCE)  # however long the other one computes
    other.release()
    assert computes.wait(60)
    thread.join()


HOLD = """
import sys, time, pathlib
from hetero_megatron.emulation.core_lock import CoreLock
lock = CoreLock(pathlib.Path(sys.argv[1]))
lock.acquire()
print("has it", flush=True)
sys.stdin.readline()
lock.release()
print("gave it", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="testbed: no /proc")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_dead_or_frozen_with_the_core_holds_nobody_up(fault: int, tmp_path: Path) -> None:
    alive, third = CoreLock(tmp_path / "core"), CoreLock(tmp_path / "core")
    pipe = subprocess.PIPE
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "core"], stdin=pipe, stdout=pipe, text=True)
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "has it\n"
        other.send_signal(fault)
        alive.acquire()
        if fault == signal.SIGSTOP:  # it goes on, and there are two tokens now
            other.send_signal(signal.SIGCONT)
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "gave it\n"
        alive.release()
        third.acquire()
        waiter = threading.Thread(target=alive.acquire)
        waiter.start()  # there is one again, and the third has it
        waiter.join(2.5 * PATIENCE)
        assert waiter.is_alive()
        third.release()
        waiter.join(60)
        assert not waiter.is_alive()
    finally:
        other.kill()
        other.communicate()


def test_who_waits_is_not_overtaken_by_one_who_has_just_had_the_core(tmp_path: Path) -> None:
    greedy, patient = CoreLock(tmp_path / "core"), CoreLock(tmp_path / "core")
    had: list[str] = []

    def wait() -> None:
        patient.acquire()
        had.append("patient")
        patient.release()

    for _ in range(30):
        greedy.acquire()
        waiter = threading.Thread(target=wait)
        waiter.start()
        while greedy._next._poll.poll(0):  # until it is the next one
            time.sleep(0.001)
        greedy.release()
        greedy.acquire()
        had.append("greedy")
        greedy.release()
        waiter.join()
    assert had == ["patient", "greedy"] * 30


def test_only_ranks_that_share_a_core_lock_it(tmp_path: Path) -> None:
    described = {"chips": "soft", "speeds": [0.5, 0.3, 0.2], "cores": [0, 1, 1]}
    locks = [Emulation(rank, described, tmp_path).clock.core for rank in range(3)]  # type: ignore[attr-defined]
    assert locks[0] is None and locks[1] is not None and locks[2] is not None
    assert {path.name.split("-")[1] for path in tmp_path.glob("core*")} == {"1"}
