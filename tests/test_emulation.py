"""The in-rank side of the testbed: emulated clock, stretched CPU time, turns, faults."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.comm import emulation as emulations
from hetero_megatron.comm import pauses
from hetero_megatron.comm import yardstick as yardsticks
from hetero_megatron.comm.clock import EmulatedClock, NominalChip, OperatorSeconds, RealClock
from hetero_megatron.comm.emulation import Emulation
from hetero_megatron.comm.pauses import Pauses
from hetero_megatron.comm.yardstick import WARM_UP, Yardstick
from hetero_megatron.errors import UserError
from hetero_megatron.launcher import read_launcher
from hetero_megatron.testbed import usual
from hetero_megatron.testbed.clocks import read_clocks, worst_clock
from hetero_megatron.testbed.state import CLOCK, CLOCKS
from hetero_megatron.testbed.usual import Unit
from tests.burning import burn

CHIP = NominalChip(1e9, 1e8, 1e8, operator_seconds=1e-5, segment_seconds=0.0)


def count(function) -> float:  # type: ignore[no-untyped-def]
    mode = OperatorSeconds(CHIP)
    with mode:
        function()
    return mode.take()


@given(m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_a_product_costs_its_flops_forward_and_backward(m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(k, n, requires_grad=True)
    assert count(lambda: a @ b) == pytest.approx(1e-5 + 2 * m * n * k / 1e9)
    assert count(lambda: torch.zeros(m, n).addmm_(a.detach(), b.detach())) >= 1e-5 + 2 * m * n * k / 1e9
    out = a @ b
    backward = count(lambda: torch.autograd.backward(out, torch.ones_like(out.detach())))
    # Two products and the seed (empty, fill), plus what moving gradients costs: bounded by bytes of all of them.
    assert backward >= 2 * (1e-5 + 2 * m * n * k / 1e9)


def test_attention_costs_its_pairs_and_views_cost_nothing() -> None:
    q = torch.randn(1, 2, 32, 16)
    causal = count(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert causal == pytest.approx(1e-5 + 4 * 2 * 16 * 32 * 32 / 2 / 1e8, rel=0.05)
    assert count(lambda: q.transpose(1, 2).view(1, 32, 2, 16)[0]) == 0.0


def test_segments_last_nominal_seconds_over_speed_and_blocked_time_is_not_credited() -> None:
    mode = OperatorSeconds(CHIP)
    clock = EmulatedClock(lambda: 0.5, mode)
    a = torch.randn(100, 100)
    start = time.perf_counter()
    with clock.counting():
        for _ in range(5):
            a @ a  # 2e6 FLOP: 2.01 ms nominal, 4.02 ms emulated
            clock.pause()
            time.sleep(0.01)  # waiting for a peer
            clock.resume(0.01)
    took = time.perf_counter() - start
    assert clock.computed == pytest.approx(5 * 2 * (2e6 / 1e9 + 1e-5))
    assert took >= clock.computed + 0.05
    assert clock.report()["overrun"] < 0.2


def test_a_clock_that_the_cpu_cannot_keep_up_with_says_so() -> None:
    clock = EmulatedClock(lambda: 1000.0, OperatorSeconds(NominalChip(1e15, 1e15, 1e15, 1e-9)))
    a = torch.randn(200, 200)
    with clock.counting():
        a @ a
    assert clock.report()["overrun"] > 1


def test_what_runs_outside_counting_is_no_compute() -> None:
    """Transfers outside a step (agreements, calibration of links) tell the clock too; what follows them is nobody's."""
    clock = EmulatedClock(lambda: 1.0, OperatorSeconds(CHIP))
    a = torch.randn(50, 50)
    with clock.counting():
        a @ a
    before = clock.report()
    for _ in range(3):
        clock.pause()
        clock.resume(0.01)  # a message came
        a @ a
        burn(0.1)
    with clock.counting():
        pass
    after = clock.report()
    assert (after["emulated"], after["overrun"]) == (before["emulated"], before["overrun"])
    assert (after["late"] - before["late"]) * after["emulated"] < 0.2


def test_what_the_last_segment_of_a_step_was_late_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a rank that never waits for a peer: 30 ms per step, as a sleep that ends so much too late."""
    clock = EmulatedClock(lambda: 0.02, OperatorSeconds(CHIP))
    real, a = time.sleep, torch.randn(100, 100)
    monkeypatch.setattr(time, "sleep", lambda seconds: real(seconds + 0.03))
    for _ in range(3):
        with clock.counting():
            a @ a  # 100 ms emulated
    report = clock.report()
    assert 3 * 0.03 <= report["late"] * report["emulated"] < 3 * 0.03 + 0.5


def test_a_segment_without_an_operator_is_the_hosts() -> None:
    clock = EmulatedClock(lambda: 0.1, OperatorSeconds(NominalChip(1e9, 1e8, 1e8, 1e-5, segment_seconds=0.01)))
    a = torch.randn(20, 20)
    start = time.perf_counter()
    with clock.counting():
        a @ a
        clock.settle()
        computed = clock.computed
        a.view(400)
        torch.empty(1000)
        burn(0.02)
        clock.settle()
        assert clock.computed == computed
    took = time.perf_counter() - start
    assert computed == pytest.approx((2 * 20**3 / 1e9 + 1e-5 + 0.01) / 0.1)
    report = clock.report()
    assert report["host"] >= 0.02 / computed and report["overrun"] < 0.01
    assert took >= computed + 0.02 * 0.9  # not hidden in the sleep before it


def test_the_worst_clock_is_the_lowest_rank_of_those_that_overran_most(tmp_path: Path) -> None:
    """The launcher reads seconds of ranks 0, 1, ...; the runtime and calibration know shares, by rank in any order."""
    seconds = [(10.0, 0.1, 5.0), (20.0, 0.4, 0.0), (10.0, 0.2, 1.0), (0.0, 0.0, 0.0)]
    (tmp_path / CLOCKS).write_bytes(b"".join(CLOCK.pack(*row) for row in seconds) + b"half a row")
    shares = {r: {"overrun": over / (s or 1), "late": late / (s or 1)} for r, (s, over, late) in enumerate(seconds)}
    launcher, runtime = read_clocks(tmp_path), worst_clock(dict(reversed(shares.items())))
    assert launcher == runtime and launcher is not None
    assert launcher.facts() == {"overrun": 0.02, "late": 0.5, "worst_rank": 1, "invalid": True}
    assert launcher.complaint().startswith("INVALID: rank 1 took 2.0% more") and launcher.complaint() in str(launcher)
    kept = worst_clock({7: {"overrun": 0.0, "late": 0.5}, 3: {"overrun": 0.0, "late": 0.1}, 5: {}})
    assert kept is not None and not kept.invalid and kept.worst_rank == 3 and kept.complaint() == ""
    assert str(kept) == "testbed: ranks were behind their emulated clock by up to 50.00% of their compute"
    assert worst_clock({0: {}, 1: {}}) is None and read_clocks(tmp_path / "none") is None


def test_a_device_that_queues_its_work_is_waited_for_at_both_ends_of_a_segment() -> None:
    clock, queued, done = RealClock(), [0.05], list[float]()

    def synchronize() -> None:
        time.sleep(queued.pop() if queued else 0.0)
        done.append(time.perf_counter())

    clock.synchronize = synchronize
    with clock.counting():  # what was queued before is not this segment's
        queued.append(0.02)
    assert clock.computed == pytest.approx(0.02, abs=0.01) and len(done) == 2


def test_soft_stretches_cpu_time() -> None:
    clock = EmulatedClock(lambda: 0.25)
    start, cpu = time.perf_counter(), time.thread_time()
    with clock.counting():
        while time.thread_time() - cpu < 0.05:
            pass
    assert time.perf_counter() - start >= 0.05 / 0.25 * 0.95
    assert clock.computed == pytest.approx(0.2, rel=0.1)


USUAL = Unit(cold=1e-3, warm=2e-3)


class Fake(Yardstick):
    """Readings as given, then the last ones for ever."""

    def __init__(self, cold: list[float], warm: list[float], shared: Path | None = None) -> None:
        self._given = [USUAL.cold] * WARM_UP + cold, [USUAL.warm] * WARM_UP + warm
        super().__init__(USUAL, shared)

    def read_cold(self) -> float:
        return self._next(self._given[0])

    def read_warm(self) -> float:
        return self._next(self._given[1])

    def _next(self, given: list[float]) -> float:
        return given.pop(0) if len(given) > 1 else given[0]


def _counted(yardstick: Yardstick, cpu: float, pieces: int = 40, pause: float = 0.001) -> list[float]:
    """What pieces of work count that are said to take ``cpu`` seconds; each is time for one reading in its midst, and
    for one before it after a pause."""
    found = []
    for _ in range(pieces):
        time.sleep(pause)
        if not pause:
            yardstick._stopped = time.perf_counter()
        yardstick.start()
        burn(0.002)
        yardstick.stop()
        found.append(yardstick.usual_seconds(cpu))
    return found


def test_a_core_that_has_become_slower_is_no_slower_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a core that does everything 1.5 times as slowly CPU seconds grow by that, and what they count does not."""
    monkeypatch.setattr(yardsticks, "EVERY", 0.002)
    assert _counted(Fake([1e-3], [2e-3]), 0.1) == pytest.approx([0.1] * 40)
    slower = _counted(Fake([1.5e-3], [3e-3]), 0.15, 300)
    assert slower[-1] == pytest.approx(0.1, rel=1e-2)
    assert slower == sorted(slower, reverse=True) and 0.1 < slower[4] < 0.14  # soon, and not by one odd reading


def test_a_reading_that_was_interrupted_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks, "EVERY", 0.002)
    amid = _counted(Fake([1e-3], [2e-3] * 60 + [40e-3, 2e-3]), 0.1, 100)  # one took 20 times as long, as some do
    assert 0.1 / 1.21 < min(amid) < 0.1 / 1.15
    after = _counted(Fake([1e-3] * 60 + [20e-3, 1e-3], [2e-3]), 0.003, 100)
    assert 0.003 / 1.21 < min(after) < 0.003 / 1.15
    far = Fake([10e-3], [20e-3])  # a core of a tenth of its speed is still found
    assert _counted(far, 0.1, 400)[-1] == pytest.approx(0.01, rel=0.05)


def test_work_after_a_pause_counts_in_units_of_the_reading_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """After pauses everything takes three times as long, in the midst of work as long as usual: the first 3 ms count a
    third."""
    monkeypatch.setattr(yardsticks, "EVERY", 0.002)
    assert _counted(Fake([3e-3], [2e-3]), 0.1, 200)[-1] == pytest.approx(0.003 / 3 + 0.097, rel=1e-3)
    assert _counted(Fake([3e-3], [2e-3]), 0.1, pause=0.0) == pytest.approx([0.1] * 40)  # without pauses
    pieces = Fake([2e-3], [2e-3])
    _counted(pieces, 0.0, 200)
    time.sleep(0.001)
    pieces.start()
    pieces.stop()
    short = [pieces.usual_seconds(0.0015) for _ in range(4)]  # of one stretch of work: the first two follow the pause
    assert short == pytest.approx([0.00075, 0.00075, 0.0015, 0.0015], rel=1e-3)


def test_a_yardstick_is_read_in_the_midst_of_work_and_does_not_count_itself() -> None:
    readings = list[float]()  # CPU seconds; a host that is busy makes some of them much longer than asked

    class Slow(Yardstick):
        def read_cold(self) -> float:
            return 1e-3

        def read_warm(self) -> float:
            start = time.thread_time()
            burn(0.005)
            readings.append(time.thread_time() - start)
            return 2e-3

    clock = EmulatedClock(lambda: 0.9, yardstick=Slow(USUAL))
    readings.clear()
    start = time.thread_time()
    with clock.counting():
        burn(0.3)
    took, count = time.thread_time() - start, len(readings)
    assert 5 <= count <= 0.3 / yardsticks.EVERY + 1
    assert clock.computed * 0.9 == pytest.approx(took - sum(readings), rel=0.02)
    burn(0.1)  # nobody's work
    assert len(readings) == count


def test_a_clock_counts_work_not_cpu_seconds() -> None:
    fast = EmulatedClock(lambda: 0.5, yardstick=_settled(0.5))  # a core that is twice as fast as it usually is
    start = time.perf_counter()
    with fast.counting():
        burn(0.02)
    took = time.perf_counter() - start
    assert fast.computed == pytest.approx(0.02 * 2 / 0.5, rel=0.1) and took >= 0.08
    slow = EmulatedClock(lambda: 0.9, yardstick=_settled(3))
    with slow.counting():
        burn(0.02)
    assert slow.report()["overrun"] > 1  # too slow by now for the chip that it is to be: said, not hidden


def _settled(times: float) -> Yardstick:
    """One of whose readings all have taken so many times as long as usual for long."""
    yardstick = Fake([times * USUAL.cold], [times * USUAL.warm])
    for _ in range(50):
        yardstick.cold.add(times * USUAL.cold)
        yardstick.warm.add(times * USUAL.warm)
    return yardstick


def test_ranks_of_a_core_share_what_their_yardsticks_read(tmp_path: Path) -> None:
    one, other = (Fake([1e-3], [2e-3], tmp_path / "core-0") for _ in range(2))
    apart = Fake([1e-3], [2e-3], tmp_path / "core-1")
    for _ in range(50):
        one.cold.add(4e-3)
        one.warm.add(4e-3)
    assert [other.usual_seconds(0.1), apart.usual_seconds(0.1)] == pytest.approx([0.05, 0.1], rel=1e-3)
    other._cold = 0.003
    assert other.usual_seconds(0.003) == pytest.approx(0.003 / 4, rel=1e-3)


def test_the_unit_of_soft_chips_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(usual, "SECONDS", 0.1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    first, kept = usual.unit_of_speed(cores)
    path = usual.unit_file()
    assert path.is_relative_to(tmp_path) and kept.startswith(f"kept in {path}")
    assert all(1e-5 < seconds < 0.5 for seconds in first)
    assert usual.unit_of_speed(cores) == (first, f"kept in {path}")
    monkeypatch.setattr(usual, "_measure", lambda cores: (Unit(0.1, 0.25), ""))
    path.write_text("{")  # spoilt: measured again
    assert usual.unit_of_speed(cores)[0] == (0.1, 0.25)
    monkeypatch.setattr(usual, "WORK", replace(usual.WORK, cold_products=9))  # another piece of work has another unit
    monkeypatch.setattr(usual, "_measure", lambda cores: (Unit(0.1, 0.5), ""))
    assert usual.unit_of_speed(cores)[0] == (0.1, 0.5)
    assert sorted(json.loads(path.read_text()).values()) == [[0.1, 0.25], [0.1, 0.5]]
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file, no folder
    assert "cannot be kept" in usual.unit_of_speed(cores)[1]
    clocks = [Emulation(0, {"chips": "soft", "speeds": [0.5], "usual": u}).clock for u in ([0.1, 0.25], None)]
    assert [clock.yardstick is not None for clock in clocks] == [True, False]  # type: ignore[attr-defined]


def test_of_several_first_runs_at_once_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = itertools.count(1)

    def measure(cores: object) -> tuple[Unit, str]:
        time.sleep(0.1)
        return Unit(0.1, next(measured) / 5), ""

    monkeypatch.setattr(usual, "_measure", measure)
    found: list[Unit] = []
    threads = [threading.Thread(target=lambda: found.append(usual.unit_of_speed([0])[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(0.1, 0.2)] * 4 and list(json.loads(usual.unit_file().read_text()).values()) == [[0.1, 0.2]]


def test_a_unit_that_cannot_be_measured_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be measured: .*Invalid argument.*--chips clock"):
        usual.unit_of_speed([10_000])  # no such core
    assert not usual.unit_file().exists()


def test_without_a_testbed_nothing_is_emulated() -> None:
    emulation = Emulation.of(read_launcher({}), 0)
    assert type(emulation.clock) is RealClock and emulation.pacer is None and emulation.describe() == ""


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"chips": "soft"}', '{"chips": "soft", "speeds": [1.0]}', '{"chips": "soft", "speeds": 1}',
             '{"chips": "none", "links": "paced", "pace": {}}', "[" * 5000]
)  # fmt: skip
def test_a_file_of_no_testbed_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "testbed.json").write_text(text)
    with pytest.raises(UserError, match="testbed.json"):
        Emulation.of(read_launcher({"HETERO_TESTBED": str(tmp_path / "testbed.json")}), 1)


def test_the_control_file_changes_speed_and_rate(tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    described = {
        "chips": "soft", "links": "paced", "speeds": [1.0, 0.5], "control": str(control),
        "pace": {"bandwidth": [[None, 1e6], [1e6, None]], "latency": [[0, 0.001], [0.001, 0]]},
    }  # fmt: skip
    file = tmp_path / "testbed.json"
    file.write_text(json.dumps(described))
    environment = {"HETERO_TESTBED": str(file), "HETERO_TESTBED_DIR": str(tmp_path)}
    emulation = Emulation.of(read_launcher(environment), 1)
    assert isinstance(emulation.clock, EmulatedClock) and emulation.clock.speed() == 0.5
    control.write_text(json.dumps({"speed": {"1": 0.125}, "rate": [[1, 0, 5.0]]}))
    emulation._looked = 0.0
    assert emulation.clock.speed() == 0.125
    assert emulation.pacer is not None and emulation.pacer.rate() == {0: 5.0}
    emulation.started()
    assert (tmp_path / "ready-1").exists() and not (tmp_path / "pauses-1").exists()


def test_ranks_measure_what_a_quota_costs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other alone on their core, then all at once; a third one never starts."""
    monkeypatch.setattr(emulations, "MEET_SECONDS", 1.0)
    for name in ("ALONE", "COOLING", "SLOWED"):
        monkeypatch.setattr(pauses, name, 0.1)
    described = {"chips": "quota", "links": "none", "speeds": [0.5, 0.25, 0.25], "cores": [0, 0, 0]}
    seen: list[tuple[str, int]] = []
    alone, cost = Pauses.alone, Pauses.cost

    def watch(function):  # type: ignore[no-untyped-def]
        def watched(*args: float) -> object:
            seen.append((f"{function.__name__} begins", threading.get_ident()))
            result = function(*args)
            seen.append((f"{function.__name__} ends", threading.get_ident()))
            return result

        return watched

    monkeypatch.setattr(Pauses, "alone", watch(alone))
    monkeypatch.setattr(Pauses, "cost", watch(cost))
    ranks = [threading.Thread(target=Emulation(rank, described, tmp_path).started) for rank in (0, 1)]
    start = time.monotonic()
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert time.monotonic() - start < 5
    first = [(what, who) for what, who in seen if "alone" in what]
    assert seen[:4] == first and first[0][1] == first[1][1] != first[2][1] == first[3][1]
    costs = [float((tmp_path / f"pauses-{rank}").read_text()) for rank in (0, 1)]
    assert all(0 <= cost < 0.025 for cost in costs) and not (tmp_path / "pauses-2").exists()


@pytest.mark.parametrize(("unit", "expected"), [(0.015, 0.00125), (0.008, 0.0)])
def test_what_the_pauses_of_a_quota_cost(unit: float, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten units of work in a second, 40 periods; alone, a unit took 10 ms."""
    work = iter([(9.9, 1, 9.9), (0.3, 30, 0.3), (9.9, 1, 9.9), (10 * unit, 10, 1.0)])
    monkeypatch.setattr(Pauses, "_work", lambda *_: next(work))
    measured = Pauses()
    assert measured.cost(measured.alone(), 0.025) == pytest.approx(expected)
