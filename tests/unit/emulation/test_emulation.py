"""The in-rank side of the testbed: emulated clock, stretched CPU time, faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.comm import hooks as hooks_module
from hetero_megatron.comm.hooks import Clock, start_now
from hetero_megatron.emulation import Emulation
from hetero_megatron.emulation import clock as clock_module
from hetero_megatron.emulation.clock import EmulatedClock, NominalChip, OperatorSeconds
from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.testbed.clocks import read_clocks, spread, worst_clock
from hetero_megatron.testbed.state import CLOCK, CLOCKS

CHIP = NominalChip(1e9, 1e8, 1e8, operator_seconds=1e-5, segment_seconds=0.0)


class FakeTime:
    """In place of the module ``time``: goes on when it is told to, so that what others do on this machine is in no
    figure. ``oversleep``: seconds by which every sleep ends too late."""

    def __init__(self) -> None:
        self.wall, self.cpu, self.oversleep = 100.0, 10.0, 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.wall += seconds + self.oversleep

    def compute(self, seconds: float) -> None:
        """The thread computes."""
        self.wall, self.cpu = self.wall + seconds, self.cpu + seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (hooks_module, clock_module):
        monkeypatch.setattr(module, "time", fake)
    return fake


def count(function: Callable[[], object]) -> float:
    mode = OperatorSeconds(CHIP)
    with mode:
        function()
    return mode.take()


@given(m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_a_product_costs_its_flops_forward_and_backward(m: int, n: int, k: int) -> None:
    a, b = torch.randn(m, k, requires_grad=True), torch.randn(k, n, requires_grad=True)
    assert count(lambda: a @ b) == pytest.approx(1e-5 + 2 * m * n * k / 1e9)
    by_onednn = count(lambda: torch.ops.mkldnn._linear_pointwise(a.detach(), b.detach().t(), None, "none", [], ""))
    assert by_onednn == pytest.approx(1e-5 + 2 * m * n * k / 1e9)
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


def test_segments_last_nominal_seconds_over_speed_and_blocked_time_is_not_credited(now: FakeTime) -> None:
    clock, a, start = EmulatedClock(lambda: 0.5, OperatorSeconds(CHIP)), torch.randn(100, 100), now.wall
    with clock.counting():
        for _ in range(5):
            a @ a  # 2e6 FLOP: 2.01 ms nominal, 4.02 ms emulated
            now.compute(0.001)
            clock.pause()
            now.wall += 0.01  # waiting for a peer
            clock.resume(0.01)
    assert clock.computed == pytest.approx(5 * 2 * (2e6 / 1e9 + 1e-5))
    assert now.wall - start == pytest.approx(clock.computed + 0.05)
    assert clock.report() == pytest.approx({"emulated": clock.computed, "overrun": 0.0, "late": 0.0, "host": 0.0})


def test_a_clock_that_the_cpu_cannot_keep_up_with_says_so(now: FakeTime) -> None:
    clock, a = EmulatedClock(lambda: 1.0, OperatorSeconds(CHIP)), torch.randn(100, 100)
    with clock.counting():
        a @ a  # 2.01 ms
        now.compute(0.00603)
    assert clock.report()["overrun"] == pytest.approx(2) and clock.report()["late"] == pytest.approx(2)


def test_what_runs_outside_counting_is_no_compute(now: FakeTime) -> None:
    """Transfers outside a step (agreements, calibration of links) tell the clock too; what follows them is nobody's."""
    clock, a = EmulatedClock(lambda: 1.0, OperatorSeconds(CHIP)), torch.randn(50, 50)
    with clock.counting():
        a @ a
    before = clock.report()
    for _ in range(3):
        clock.pause()
        clock.resume(0.01)  # a message came
        a @ a
        now.compute(0.1)
    with clock.counting():
        pass
    assert clock.report() == before


def test_lateness_is_made_up_unless_a_peer_was_waited_for_or_the_step_ends(now: FakeTime) -> None:
    clock, a = EmulatedClock(lambda: 0.1, OperatorSeconds(CHIP)), torch.randn(100, 100)
    now.oversleep = 0.003
    start = now.wall
    with clock.counting():
        for waited in (0.0, 0.01, 0.0):
            a @ a  # 20.1 ms emulated
            clock.pause()
            clock.resume(waited)
    # The first sleep's 3 ms are made up by the second segment; the second's are lost, and the last one's.
    assert now.wall - start == pytest.approx(clock.computed + 2 * 0.003)
    assert clock.report()["late"] * clock.computed == pytest.approx(2 * 0.003)


def test_a_segment_without_an_operator_is_the_hosts(now: FakeTime) -> None:
    clock = EmulatedClock(lambda: 0.1, OperatorSeconds(NominalChip(1e9, 1e8, 1e8, 1e-5, segment_seconds=0.01)))
    a, start = torch.randn(20, 20), now.wall
    with clock.counting():
        a @ a
        clock.settle()
        computed = clock.computed
        a.view(400)
        torch.empty(1000)
        now.compute(0.02)
    assert clock.computed == computed == pytest.approx((2 * 20**3 / 1e9 + 1e-5 + 0.01) / 0.1)
    assert clock.report()["host"] == pytest.approx(0.02 / computed) and clock.report()["overrun"] == 0
    assert now.wall - start == pytest.approx(computed + 0.02)  # not hidden in the sleep before it


def test_a_device_that_queues_its_work_is_waited_for_at_both_ends_of_a_segment(now: FakeTime) -> None:
    clock, queued = Clock(), [0.05]

    def synchronize() -> None:
        now.wall += queued.pop() if queued else 0.0

    clock.synchronize = synchronize
    with clock.counting():  # what was queued before is not this segment's
        queued.append(0.02)
    assert clock.computed == pytest.approx(0.02)


def test_soft_stretches_the_cpu_time_of_a_segment(now: FakeTime) -> None:
    clock, start = EmulatedClock(lambda: 0.25), now.wall
    with clock.counting():
        now.compute(0.03)
        now.wall += 0.02  # another process had the core
        now.compute(0.02)
        clock.pause()
        now.compute(0.5)  # the transfer's own work is not the chip's
        clock.resume()
    assert clock.computed == pytest.approx(0.05 / 0.25)
    assert now.wall - start == pytest.approx(0.05 / 0.25 + 0.5) and clock.report()["late"] == 0


def test_soft_counts_this_machines_own_cpu_time() -> None:
    """Only what holds on a loaded machine, too: the seconds are CPU seconds, and no segment ends before its time."""
    clock, start, cpu = EmulatedClock(lambda: 0.25), time.perf_counter(), time.thread_time()
    with clock.counting():
        inside = time.thread_time()
        while time.thread_time() - inside < 0.05:
            pass
    assert 0.05 / 0.25 <= clock.computed <= (time.thread_time() - cpu) / 0.25
    assert time.perf_counter() - start >= clock.computed


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


def test_the_spread_is_that_of_the_rank_whose_steps_vary_most() -> None:
    """Standard deviation over mean, without the first step; by hand: 0.9, 1.0, 1.1 -> 0.0816."""
    steps = [[9.0, 9.0, 0.0], [0.9, 2.0, 0.0], [1.0, 2.1, 0.0], [1.1, 2.0, 0.0]]  # the third rank holds no layers
    assert spread(steps) == pytest.approx(0.0816, abs=1e-4)
    assert spread(steps[:2]) is None and spread([]) is None and spread([[0.0]] * 4) is None
    kept = worst_clock({0: {"overrun": 0.0, "late": 0.0}})
    assert kept is not None and "spread" not in kept.facts()


def test_without_a_testbed_nothing_is_emulated() -> None:
    emulation = Emulation.of(read_launcher({}))
    hooks = emulation.hooks()
    assert type(hooks.clock) is Clock and hooks.submit is start_now and emulation.describe() == ""
    assert emulation.facts() == {} and not hooks.cut_ranks()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"chips": "soft"}', '{"chips": "soft", "speeds": [1.0]}', '{"chips": "soft", "speeds": 1}',
             '{"chips": "quota", "speeds": [1.0, 1.0]}', '{"chips": "none", "links": "paced", "pace": {}}', "[" * 5000]
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
    assert emulation.hooks().cut_ranks() == frozenset()
    control.write_text(json.dumps({"speed": {"1": 0.125}, "rate": [[1, 0, 0.0]]}))
    emulation._looked = 0.0
    assert emulation.clock.speed() == 0.125
    assert emulation.pacer is not None and emulation.pacer.rate() == {0: 0.0}
    assert emulation.hooks().cut_ranks() == {0}
    emulation.started()
    assert (tmp_path / "ready-1").exists()
