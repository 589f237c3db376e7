"""Goodput of 1,024 hosts that fail and come back: the launcher's own decisions, on simulated hosts and time.

What runs is ``training.supervise.Supervisor``, as ``hetero-megatron run --via ssh --on-failure replan`` runs it, with
simulated agents: a host is lost, its ranks end by a signal and the others give up; the launcher drops it and goes on
under the best plan that fits; the host is repaired, the launcher takes it back. Throughputs are the planner's for the
hosts that are left (data-sheet rates). Compared with waiting for the repair and starting the same plan again, without
and with spare hosts.

Failures: Meta's report on Llama 3 (arXiv 2407.21783, table 5): 419 unexpected interruptions in 54 days on 16,384 GPUs,
78 % of them by hardware. The others end the ranks of a host, which goes on. Assumed, and varied: hours of repair.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.launch import supervise
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Supervisor
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import load_model

DAY, HOUR = 86400.0, 3600.0
PER_HOST_SECOND = 419 / (54 * DAY * 16384 / 8)
HARDWARE = 0.78
TYPES = (("h100", "H100-SXM"), ("a100", "A100-80-SXM"))
HOSTS, CHIPS = 512, 8  # per type; per host
MODEL, BATCH = "llama2-70b", 4096
FALLBACKS = (0, 1, 2, 4, 8, 16, 32)  # hosts of each type that a plan does without
SAVE, RESTART, DETECT, LOOK = 600.0, 300.0, 30.0, 60.0  # seconds: between checkpoints, to start, to notice, to look


def throughputs(file: Path | None) -> dict[tuple[int, int], float]:
    """Tokens per second of the planner's plan by numbers of hosts, searched or read from an earlier run."""
    if file is not None and file.exists():
        return {(a, b): rate for a, b, rate in json.loads(file.read_text())}
    found = {}
    for less in FALLBACKS:
        count = HOSTS - less
        nodes = [{"name": name, "count": count, "chip": chip, "chips_per_node": CHIPS} for name, chip in TYPES]
        links = {"inter_node": {"bandwidth": "50 GB/s", "latency": "10 us"}}
        problem = PlanningProblem(load_model(MODEL), cluster_from_dict({"nodes": nodes, "links": links}), 4096, BATCH)
        found[count, count] = search(problem).best.prediction.tokens_per_second
        print(f"plan for {count} + {count} hosts: {found[count, count]:,.0f} tokens/s", flush=True)
    if file is not None:
        file.write_text(json.dumps([[*counts, rate] for counts, rate in found.items()]))
    return found


@dataclass
class World:
    """Hosts that fail and come back; the same ones for every policy, by ``seed``."""

    seed: int
    repair_hours: float
    horizon: float
    now: float = 0.0
    up: set[str] = field(default_factory=set)
    events: list[tuple[float, str, bool]] = field(default_factory=list)  # time, host, whether its hardware fails
    back: list[tuple[float, str]] = field(default_factory=list)
    losses: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        names = [f"{name}-{i}" for name, _ in TYPES for i in range(HOSTS)]
        self.up = set(names)
        at = 0.0
        while at < self.horizon:
            at += self.random.expovariate(PER_HOST_SECOND * len(names))
            self.events.append((at, self.random.choice(names), self.random.random() < HARDWARE))

    def next_failure(self, hosts: set[str], until: float) -> tuple[float, str, bool] | None:
        """The first one of these hosts up to ``until``; those of others pass."""
        while self.events and self.events[0][0] <= until:
            event = self.events.pop(0)
            if event[1] in self.up and event[1] in hosts:
                return event
        return None

    def lose(self, host: str, at: float) -> None:
        self.up.discard(host)
        self.losses += 1
        heapq.heappush(self.back, (at + self.random.expovariate(1 / (self.repair_hours * HOUR)), host))

    def repair(self, until: float) -> None:
        while self.back and self.back[0][0] <= until:
            self.up.add(heapq.heappop(self.back)[1])


@dataclass
class Progress:
    """Tokens that count: those of the last checkpoint, after a failure."""

    tokens: float = 0.0

    def trained(self, seconds: float, rate: float, kept: bool) -> None:
        self.tokens += rate * (seconds if kept else SAVE * int(seconds / SAVE))


class SimulatedJob:
    """A round of the job, with one rank per host."""

    def __init__(self, setup: Setup, world: World, progress: Progress, rates: dict[str, float]) -> None:
        self.ranks = list(range(len(setup.seats)))
        self.nodes = [seat.node for seat in setup.seats]
        self.world, self.progress, self.rate = world, progress, rates[str(setup.plan)]
        world.now += RESTART
        self.began, self._codes, self._stop = world.now, dict[int, int](), False

    def poll(self) -> dict[int, int]:
        world = self.world
        if self._codes or self._stop:
            self._codes = self._codes or dict.fromkeys(self.ranks, 0)
            return self._codes
        dead = [n for n in self.nodes if n not in world.up]  # lost while the job started
        nearest = min((at for at, _ in world.back), default=world.horizon)
        until = min(max(nearest, world.now) + LOOK, world.horizon)
        event = None if dead else world.next_failure(set(self.nodes), until)
        if dead:
            self._fail(dead, -9)
        elif event is not None:
            world.now = max(event[0], world.now)
            if event[2]:
                world.lose(event[1], event[0])
            self._fail([event[1]], -9 if event[2] else 1)
        elif until >= world.horizon:
            world.now = world.horizon
            self.progress.trained(world.now - self.began, self.rate, kept=True)
            self._codes = dict.fromkeys(self.ranks, 0)
        else:
            world.now = until
            world.repair(until)
        return self._codes

    def _fail(self, nodes: Sequence[str], code: int) -> None:
        self.progress.trained(self.world.now - self.began, self.rate, kept=False)
        self.world.now += DETECT
        self._codes = {rank: code if node in nodes else 143 for rank, node in enumerate(self.nodes)}

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        """The ranks save and stop."""
        self.progress.trained(self.world.now - self.began, self.rate, kept=True)
        self._stop = True

    def kill(self) -> None:
        pass


@dataclass
class Repaired:
    """``Supervisor``'s watch: which of the lost nodes are up again."""

    world: World

    def look(self, first: Path, lost: set[str], present: set[str]) -> set[str]:
        return lost & self.world.up

    def close(self) -> None:
        pass


def replanned(world: World, found: dict[tuple[int, int], float]) -> tuple[float, int]:
    """(tokens, rounds) under the launcher."""
    rates = {f"{a}+{b}.yaml": rate for (a, b), rate in found.items()}
    whole = f"{HOSTS}+{HOSTS}.yaml"
    rates[whole] = max(found.values())  # a plan may leave hosts idle

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        counts = [sum(seat.node.startswith(name) for seat in seats) for name, _ in TYPES]
        fit = [c for c in found if all(need <= have for need, have in zip(c, counts, strict=True))]
        best = max(fit, key=lambda c: found[c], default=None)
        return None if best is None else Path(f"{best[0]}+{best[1]}.yaml")

    progress, rounds = Progress(), [0]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        nodes = [{"name": name, "count": HOSTS, "chip": chip, "chips_per_node": 1} for name, chip in TYPES]
        cluster.write_text(yaml.safe_dump({"nodes": nodes}))
        seats = tuple(Seat(f"{name}-{i}", 0) for name, _ in TYPES for i in range(HOSTS))

        def launch(setup: Setup, words: Sequence[str], number: int) -> SimulatedJob:
            rounds[0] = number + 1
            return SimulatedJob(setup, world, progress, rates)

        supervisor = Supervisor(
            Setup(Path(whole), seats, cluster), [], "replan", choose, 1 << 30, 1e9, Path(folder), lambda text: None,
            launch=launch, watch=Repaired(world),
        )  # fmt: skip
        supervisor.log = lambda text: None  # type: ignore[method-assign]  # a line per rank and round
        assert supervisor.run() == 0
    return progress.tokens, rounds[0]


def elastic(
    world: World, found: dict[tuple[int, int], float], options: argparse.Namespace, notice: bool, lost: dict[str, float]
) -> tuple[float, int]:
    """(tokens, epochs) under the launcher of ``run --elastic``; ``lost``: adds the tokens lost, by what to.

    Args:
        notice: a host says so before it fails, so that its ranks hand over.
    """
    from benchmarks import bench_spot

    def level(nodes: Collection[str]) -> int:
        """Hosts of each type, of the type of which there are fewest."""
        return min(sum(node.startswith(name) for node in nodes) for name, _ in TYPES)

    best = [max((c for c in found if c[0] <= n), key=lambda c: found[c], default=None) for n in range(HOSTS + 1)]
    rates = [0.0 if counts is None else found[counts] for counts in best]
    up, events = set(world.up), list[tuple[float, str, bool]]()
    trace = bench_spot.Trace([], world.horizon, 0, 0)
    while (event := world.next_failure(world.up, world.horizon)) is not None:
        at, host, hardware = event
        if hardware:
            world.lose(host, at)
            events.append((at, host, False))
        else:  # its ranks end, and it joins again
            events += [(at, host, False), (at + 1.0, host, True)]
        nearest = world.events[0][0] if world.events else world.horizon
        while world.back and world.back[0][0] <= nearest:
            events.append((world.back[0][0], world.back[0][1], True))
            world.repair(world.back[0][0])
    trace.events, trace.up = sorted(event for event in events if event[0] < world.horizon), set(up)
    here, changes = set(up), [(0.0, HOSTS)]
    for at, host, _ in trace.events:
        here ^= {host}
        changes.append((at, level(here)))
    trace.changes = changes
    members = bench_spot.SimulatedMembers(trace, rates, options, notice, sorted(up), level)  # type: ignore[arg-type]
    plan = lambda seats: f"{best[level([seat.node for seat in seats])]}.yaml"  # noqa: E731
    bench_spot.run_in_place(members, trace, plan, verbose=False)
    for why, tokens in members.lost.items():
        lost[why] += tokens
    lost["hosts that are gone"] += max(rates) * world.horizon - bench_spot.possible(trace, rates)
    return members.tokens, members.epochs


def waited(world: World, rate: float, used: int, spares: int) -> tuple[float, int]:
    """(tokens, rounds) of one plan on ``used`` hosts of each type, which waits until so many are up."""
    progress, rounds = Progress(), 0
    names = {name: [f"{name}-{i}" for i in range(used + spares)] for name, _ in TYPES}
    while world.now < world.horizon:
        world.repair(world.now)
        if any(sum(host in world.up for host in hosts) < used for hosts in names.values()):
            if not world.back:
                break
            world.now = max(world.now, world.back[0][0])
            continue
        mine = {host for hosts in names.values() for host in [h for h in hosts if h in world.up][:used]}
        world.now, rounds = world.now + RESTART, rounds + 1
        began = world.now
        event = world.next_failure(mine, world.horizon)
        if event is None:
            progress.trained(max(0.0, world.horizon - began), rate, kept=True)
            break
        world.now = max(event[0], world.now)
        progress.trained(world.now - began, rate, kept=False)
        if event[2]:
            world.lose(event[1], event[0])
        world.now += DETECT
    return progress.tokens, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plans", type=Path, help="keep the planner's throughputs in this file")
    parser.add_argument("--elastic", action="store_true", help="also under run --elastic (minutes for each seed)")
    parser.add_argument("--switch", type=float, default=15.0, help="seconds between two epochs' steps")
    args = parser.parse_args()
    options = argparse.Namespace(start=RESTART, save=SAVE, detect=DETECT, switch=args.switch)
    supervise.time.sleep = lambda seconds: None  # type: ignore[assignment]  # between two polls: simulated hosts are quick
    found = throughputs(args.plans)
    most = max(found.values())
    horizon = args.days * DAY
    print(f"{machine()}\n{2 * HOSTS:,} hosts of {CHIPS}, {args.days:g} days, {PER_HOST_SECOND * 2 * HOSTS * DAY:.2f} "
          f"interruptions a day; {args.seeds} seeds; undisturbed {most:,.0f} tokens/s")  # fmt: skip
    print(f"{'repair':>8}  {'policy':<44}{'goodput':>9}{'starts':>8}")
    for hours in (1.0, 4.0, 24.0):
        rows: dict[str, list[tuple[float, int]]] = {}
        lost: dict[str, dict[str, float]] = {}
        for seed in range(args.seeds):
            make = lambda: World(seed, hours, horizon)  # noqa: B023, E731
            rows.setdefault("launcher: replan, take back", []).append(replanned(make(), found))
            for name, notice in (("elastic", False), ("elastic, told before hosts fail", True)) if args.elastic else ():
                causes = lost.setdefault(name, defaultdict(float))
                rows.setdefault(name, []).append(elastic(make(), found, options, notice, causes))
            rows.setdefault("same plan after repair", []).append(waited(make(), most, HOSTS, 0))
            for spares in (4, 16):
                less = (HOSTS - spares, HOSTS - spares)
                fit = [rate for counts, rate in found.items() if all(n <= m for n, m in zip(counts, less, strict=True))]
                name = f"same plan, {2 * spares} hosts held back as spares"
                rows.setdefault(name, []).append(waited(make(), max(fit), HOSTS - spares, spares))
        for name, runs in rows.items():
            goodput = sum(tokens for tokens, _ in runs) / len(runs) / (most * horizon)
            print(f"{hours:>6g} h  {name:<44}{goodput:>9.1%}{sum(n for _, n in runs) / len(runs):>8.0f}", flush=True)
            for why, tokens in sorted(lost.get(name, {}).items(), key=lambda item: -item[1]):
                print(f"{'':>10}  lost to {why:<36}{tokens / len(runs) / (most * horizon):>9.2%}", flush=True)


if __name__ == "__main__":
    main()
