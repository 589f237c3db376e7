"""Goodput on spot machines that come and go: the launchers' own decisions, on a recorded trace and simulated time.

What runs are ``Supervisor`` (``hetero-megatron run --on-failure replan``) and ``InPlaceSupervisor`` (``run --elastic
--wait-for-hosts``), with simulated processes: machines with one GPU each are taken and come back as the trace says, and
the job goes on under the planner's best plan for at most so many. Compared with one plan for all machines, started
whenever all are there.

Assumed, by flags: seconds from the start of a process until it is ready, between checkpoints, to notice a lost machine,
and to switch epochs (benchmarks/bench_elastic.py measures that of a tiny model).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import yaml

from benchmarks import bench_goodput
from benchmarks.bench_goodput import Progress, Repaired, SimulatedJob, machine
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.comm.epochs import EpochStore, JoinRequest, Speed
from hetero_megatron.comm.job_store import connect_store
from hetero_megatron.errors import UserError
from hetero_megatron.launch import in_place, supervise
from hetero_megatron.launch.in_place import InPlaceSupervisor
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Supervisor
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import load_model
from hetero_megatron.training.agreement import program_facts

CHIP, MODEL, SEQUENCE, BATCH = "V100-16-SXM2", "gpt2", 1024, 512
FOREVER = 1e12


def throughputs(most: int) -> list[float]:
    """Tokens per second of the best plan for at most n machines, n = 0, 1, …"""
    found = [0.0]
    for count in range(1, most + 1):
        nodes = [{"name": "v100", "count": count, "chip": CHIP, "chips_per_node": 1}]
        links = {"inter_node": {"bandwidth": "3 GB/s", "latency": "30 us"}}
        cluster = cluster_from_dict({"nodes": nodes, "links": links})
        problem = PlanningProblem(load_model(MODEL), cluster, SEQUENCE, BATCH, SearchOptions(dtype="fp16"))
        found.append(max(found[-1], search(problem).best.prediction.tokens_per_second))
    return found


@dataclass
class Trace:
    """Which machines are there; those that are taken or come are drawn by ``seed``, the same for every policy.

    Attributes:
        events: (time, machine, whether it comes), in order.
        now, up: of the simulation; ``back``: those that come, as ``SimulatedJob`` looks for them.
    """

    changes: Sequence[tuple[float, int]]
    horizon: float
    most: int
    seed: int
    now: float = 0.0
    up: set[str] = field(default_factory=set)
    events: list[tuple[float, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice, here = random.Random(self.seed), set[str]()
        everyone = [f"v100-{i}" for i in range(self.most)]
        for at, count in self.changes:
            comes = count > len(here)
            pool = [name for name in everyone if (name in here) != comes]
            for name in dice.sample(pool, abs(count - len(here))):
                self.events.append((at, name, comes))
                here ^= {name}

    @property
    def back(self) -> list[tuple[float, str]]:
        return [(at, name) for at, name, comes in self.events if comes]

    def advance(self, until: float, hosts: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
        """Up to ``until``, or the first moment at which some of ``hosts`` are taken: these."""
        taken: list[str] = []
        while self.events and self.events[0][0] <= until and (not taken or self.events[0][0] == self.now):
            at, name, comes = self.events.pop(0)
            self.now = max(self.now, at)
            self.up ^= {name}
            taken += [name] if not comes and name in hosts else []
        if not taken:
            self.now = max(self.now, until)
        return taken

    # What ``SimulatedJob`` asks.

    def next_failure(self, hosts: set[str], until: float) -> tuple[float, str, bool] | None:
        now = self.now
        taken = self.advance(until, hosts)
        at, self.now = self.now, now
        return (at, taken[0], True) if taken else None

    def lose(self, host: str, at: float) -> None:
        pass

    def repair(self, until: float) -> None:
        self.advance(until)


def possible(trace: Trace, rates: Sequence[float], since: float = 0.0, until: float = FOREVER) -> float:
    """Tokens of the machines that are there, at every moment (of a span) under the best plan for them."""
    total, at, count = 0.0, 0.0, 0
    for then, now in [*trace.changes, (trace.horizon, 0)]:
        total += rates[count] * max(0.0, min(then, until) - max(at, since))
        at, count = then, now
    return total


def restarted(trace: Trace, rates: Sequence[float]) -> tuple[float, int]:
    """(tokens, starts) under the launcher that starts all ranks again; somebody starts it when all had been taken."""
    progress, starts = Progress(), [0]
    plans = {f"{n}.yaml": rate for n, rate in enumerate(rates)}

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        return Path(f"{len(seats)}.yaml") if seats else None

    def launch(setup: Setup, words: Sequence[str], number: int) -> SimulatedJob:
        starts[0] += 1
        return SimulatedJob(setup, trace, progress, plans)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        nodes = [{"name": "v100", "count": trace.most, "chip": CHIP, "chips_per_node": 1}]
        cluster.write_text(yaml.safe_dump({"nodes": nodes}))
        seats = tuple(Seat(f"v100-{i}", 0) for i in range(trace.most))
        while trace.now < trace.horizon:
            if not trace.up:
                trace.advance(min((at for at, _ in trace.back), default=trace.horizon))
                continue
            setup = Setup(Path(f"{trace.most}.yaml"), seats, cluster)
            one = Supervisor(setup, [], "replan", choose, 1 << 30, 1e9, Path(folder), lambda text: None,
                             launch=launch, watch=Repaired(trace))  # type: ignore[arg-type]  # fmt: skip
            one.log = lambda text: None  # type: ignore[method-assign, assignment]
            with suppress(UserError):  # no machine is left
                one.run()
    return progress.tokens, starts[0]


def waited(trace: Trace, rates: Sequence[float], start: float, save: float) -> tuple[float, int]:
    """(tokens, starts) of one plan, which runs while all machines are there."""
    tokens, starts = 0.0, 0
    while trace.now < trace.horizon and trace.events:
        if len(trace.up) < trace.most:
            trace.advance(trace.events[0][0])
            continue
        began, starts = trace.now + start, starts + 1
        taken = trace.advance(trace.horizon, set(trace.up))
        seconds = max(0.0, trace.now - began)
        tokens += rates[-1] * (save * int(seconds / save) if taken else seconds)
    return tokens, starts


class SimulatedMembers:
    """The processes of an elastic job: those that it began with, and those of machines that join.

    Args:
        rates: by level, of which ``level`` gives that of some machines.
        notice: machines are told before they are taken, so that their ranks hand over.
        first: machines that the job begins with.
    """

    secret = b""

    def __init__(
        self, trace: Trace, rates: Sequence[float], args: argparse.Namespace, notice: bool, first: Sequence[str],
        level: Callable[[Collection[str]], int] = len,
    ) -> None:  # fmt: skip
        self.trace, self.rates, self.args, self.notice = trace, rates, args, notice
        self.tokens, self.saved_at, self.epochs = 0.0, 0.0, 0
        self.lost = defaultdict[str, float](float)  # tokens that would have been possible, by what they were lost to
        self.number, self.members, self.local, self.level = 0, list(range(len(first))), len(first), level
        self.nodes = dict(enumerate(first))
        self.codes: dict[int, int] = {}
        self.asked: dict[str, tuple[int, float]] = {}  # node -> (number of its request, when it is ready)
        self.store: EpochStore | None = None
        self.program = program_facts()

    def start(self, host: str, port: int) -> SimulatedMembers:
        self.store = EpochStore(connect_store(host, port, timedelta(seconds=30), "elastic"), b"")
        self._passes("start of the job", self.trace.now + self.args.start, 0.0)
        return self

    def _passes(self, why: str, until: float, gained: float | None = None, hosts: set[str] | None = None) -> list[str]:
        """Time up to ``until``, or the first moment at which some of ``hosts`` are taken: these. What was possible
        beyond the tokens per second ``gained`` is lost to ``why``."""
        before = self.trace.now
        taken = self.trace.advance(until, hosts or set())
        gains = (gained or 0.0) * (self.trace.now - before)
        self.tokens += gains
        self.lost[why] += possible(self.trace, self.rates, before, self.trace.now) - gains
        return taken

    @property
    def alive(self) -> list[int]:
        return [m for m in self.members if m not in self.codes]

    def poll(self) -> dict[int, int]:
        store, trace = self.store, self.trace
        assert store is not None
        if (found := store.find(self.number + 1)) is not None:
            self._enter(found)
        elif trace.now >= trace.horizon:
            trace.now = trace.now if self.alive else 2 * FOREVER
            for member in self.alive:
                self.codes[member] = 0
                store.ended(member, 0)
        elif store.paused(self.number):
            for member in self.alive:
                store.stopped(self.number, member, by_failure=False)
        elif not store.has_stopped(self.number, self.alive) or not self.alive:
            self._train()
        return {m: code for m, code in self.codes.items() if m < self.local}

    def _enter(self, epoch: object) -> None:
        self.number, self.members = epoch.number, epoch.members  # type: ignore[attr-defined]
        self.epochs += 1
        self._passes("change of epochs", self.trace.now + self.args.switch)
        self._gone([self.nodes[m] for m in self.alive if self.nodes[m] not in self.trace.up], 0.0)

    def _train(self) -> None:
        """Until the next thing happens: a machine is taken, comes, or is ready."""
        trace, nodes = self.trace, {self.nodes[m] for m in self.alive}
        self._ask(nodes)
        if self._answered():
            return  # the launcher looks before time goes on
        ready = [at for _, at in self.asked.values()]
        until = min([*(at for at, _ in trace.back[:1]), *ready, trace.horizon])
        before, rate = trace.now, self.rates[self.level(nodes)]
        why = "start of machines beside others" if nodes else "start of machines when all were gone"
        taken = self._passes(why, max(until, before + 1e-3), rate, nodes)
        self.saved_at = self.saved_at or before
        if taken:
            self._gone(taken, rate)

    def _answered(self) -> bool:
        """Machines that asked and are taken, or are ready: whether something is to be done about one."""
        due = [node for node, (_, at) in self.asked.items() if node not in self.trace.up or at <= self.trace.now]
        for node in due:
            number, _ = self.asked[node]
            (self._ready if node in self.trace.up else self._withdraw)(node, number)
        return bool(due)

    def _gone(self, taken: Sequence[str], rate: float) -> None:
        """Machines of the epoch are taken."""
        store = self.store
        assert store is not None
        alive = self.alive
        lost = [m for m in alive if self.nodes[m] in taken]
        if not lost:
            return
        if self.notice:
            for member in lost:
                store.leave(member, "it was told to leave")
        elif rate:
            holders = {m: alive[(i + 1) % len(alive)] for i, m in enumerate(alive)}
            kept = len(alive) > 1 and not any(holders[m] in lost for m in lost)
            step = BATCH * SEQUENCE / rate
            since = (self.trace.now - self.saved_at) % self.args.save
            again = rate * (1.5 * step if kept else since)
            self.tokens -= again
            self.lost["steps again, from copies" if kept else "steps again, from a checkpoint"] += again
            self._passes("until a loss is noticed", self.trace.now + self.args.detect)
        for member in lost:
            code = 0 if self.notice else -9
            self.codes[member] = code
            if member >= self.local:
                store.ended(member, code)
        for member in self.alive:
            store.stopped(self.number, member, by_failure=not self.notice)

    def _ask(self, nodes: set[str]) -> None:
        """Machines that are there and have not asked: their processes start, beside the training."""
        store = self.store
        assert store is not None
        for node in sorted(self.trace.up - nodes - self.asked.keys()):
            number = store.ask_to_join(JoinRequest(f"{node}@{self.trace.now}", node, 1, "", self.program))
            self.asked[node] = number, self.trace.now + self.args.start

    def _ready(self, node: str, number: int) -> None:
        store = self.store
        assert store is not None
        answer = store.join_answer(number)
        if answer is None:
            return  # the launcher has not looked yet
        del self.asked[node]
        if answer.members:
            (member,) = answer.members
            self.nodes[member] = node
            store.ready(member, Speed(CHIP, 1.0))

    def _withdraw(self, node: str, number: int) -> None:
        store = self.store
        assert store is not None
        answer = store.join_answer(number)
        if answer is not None:
            del self.asked[node]
            for member in answer.members:
                self.codes[member] = -9
                store.ended(member, -9)

    def end(self, rank: int) -> None:
        raise AssertionError("nobody hangs here")

    def kill(self) -> None: ...


class InstantSearch:
    """A search that takes no time; see :class:`~hetero_megatron.launch.plan_search.Search`."""

    problem = ""

    def __init__(self, planner: supervise.Planner, seats: Sequence[Seat], cluster: Path | None) -> None:
        self.plan = planner(seats, cluster)

    def done(self) -> bool:
        return True

    def abandon(self) -> None: ...


def elastic(
    trace: Trace, rates: Sequence[float], args: argparse.Namespace, notice: bool, lost: dict[str, float]
) -> tuple[float, int]:
    """(tokens, epochs) under the launcher of an elastic job, which waits for machines when all were taken; ``lost``:
    adds the tokens that it lost, by what to."""
    trace.advance(trace.events[0][0])
    members = SimulatedMembers(trace, rates, args, notice, [next(iter(trace.up))])
    run_in_place(members, trace, lambda seats: f"{len(seats)}.yaml", args.verbose)
    for why, tokens in members.lost.items():
        lost[why] += tokens
    return members.tokens, members.epochs


def run_in_place(
    members: SimulatedMembers, trace: Trace, plan: Callable[[Sequence[Seat]], str], verbose: bool
) -> None:
    """The launcher over simulated processes, to the end of the trace."""
    in_place.time = SimpleNamespace(monotonic=lambda: trace.now, sleep=lambda seconds: None)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        seats = tuple(Seat(node, 0) for node in members.nodes.values())
        one = InPlaceSupervisor(
            Setup(Path(plan(seats)), seats), members.start, lambda seats, cluster: Path(plan(seats)), 1 << 30, FOREVER,
            Path(folder), lambda text: None, wait=FOREVER, search=InstantSearch,
        )  # fmt: skip
        one.log = print if verbose else lambda text: None  # type: ignore[method-assign, assignment]
        one.run()
    assert trace.now >= trace.horizon, "the launcher gave up"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help='{"seconds": …, "changes": [[second, machines], …]}')
    parser.add_argument("--seeds", type=int, default=3, help="of which machines are taken")
    parser.add_argument("--start", type=float, default=300.0, help="seconds until a process is ready")
    parser.add_argument("--save", type=float, default=600.0, help="seconds between checkpoints")
    parser.add_argument("--detect", type=float, default=30.0, help="seconds to notice a lost machine")
    parser.add_argument("--switch", type=float, default=15.0, help="seconds between two epochs' steps")
    parser.add_argument("--verbose", action="store_true", help="print what the elastic launcher says")
    args = parser.parse_args()
    bench_goodput.RESTART, bench_goodput.SAVE, bench_goodput.DETECT = args.start, args.save, args.detect
    supervise.time.sleep = lambda seconds: None  # type: ignore[assignment]
    found = json.loads(args.trace.read_text())
    most = max(count for _, count in found["changes"])
    rates = throughputs(most)
    make = lambda seed: Trace(found["changes"], found["seconds"], most, seed)  # noqa: E731
    best = possible(make(0), rates)
    days = found["seconds"] / 86400
    print(f"{machine()}\n{args.trace.name}: {most} {CHIP}, {days:.1f} days, {len(found['changes'])} changes; {MODEL}")
    print("tokens/s with 1, 2, … machines: " + ", ".join(f"{rate:,.0f}" for rate in rates[1:]))
    print(f"{'policy':<52}{'of what was possible':>22}{'starts or epochs':>18}")
    lost: dict[str, dict[str, float]] = {"elastic": defaultdict(float), "told": defaultdict(float)}
    policies = {
        "launcher: replan with a restart, take back": lambda seed: restarted(make(seed), rates),
        "elastic": lambda seed: elastic(make(seed), rates, args, False, lost["elastic"]),
        "elastic, told before machines are taken": lambda seed: elastic(make(seed), rates, args, True, lost["told"]),
        "one plan, while all machines are there": lambda seed: waited(make(seed), rates, args.start, args.save),
    }
    for name, policy in policies.items():
        runs = [policy(seed) for seed in range(args.seeds)]
        shares = [tokens / best for tokens, _ in runs]
        count = sum(number for _, number in runs) / len(runs)
        print(f"{name:<52}{min(shares):>12.1%} to {max(shares):.1%}{count:>16.0f}", flush=True)
    print(f"{'share of what was possible that is lost to':<52}{'elastic':>10}{'told':>10}")
    for why in sorted({*lost["elastic"], *lost["told"]}, key=lambda why: -lost["elastic"][why]):
        parts = (of_policy[why] / args.seeds / best for of_policy in lost.values())
        print(f"{why:<52}" + "".join(f"{part:>10.2%}" for part in parts))


if __name__ == "__main__":
    main()
