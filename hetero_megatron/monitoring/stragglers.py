"""Ranks that fall behind: each one's computing time against what it should be.

What it should be is the prediction from calibrated rates where there is one, else the rank's own earlier steps.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_fields import array, integer, number, numbered, record, require, text
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.comm import CommError
    from hetero_megatron.monitoring.reporter import Reporter
    from hetero_megatron.training.exit import ExitConditions

WARM_UP, BASELINE, RECENT = 3, 20, 8  # steps that are ignored, that make the own baseline, that are compared with it
FACTOR = 1.5
SILENCE = 100  # steps before the same rank is named again
DRIFT = 4  # exit code: stopped after a checkpoint, for the launcher to plan again
DRIFT_FILE = "drift.json"
NEWS = 1.2  # times what was told of a rank that drifts, from which it is told again
_DRIFT = record({"step": integer(), "dtype": text, "ratios": numbered(number(0))})


@dataclass(frozen=True)
class Behind:
    """A rank that computes ``seconds`` per step (median of its last steps) and should take ``should``.

    ``steady``: every one of them was too slow, so that their median is what it takes now.
    """

    rank: int
    chip: str
    seconds: float
    should: float
    predicted: bool
    steady: bool

    @property
    def ratio(self) -> float:
        return self.seconds / self.should

    def __str__(self) -> str:
        first_steps = f"in steps {WARM_UP + 1} to {WARM_UP + BASELINE} of this run"
        source = "predicted from calibrated rates" if self.predicted else first_steps
        return (
            f"rank {self.rank} ({self.chip}) falls behind: it computes {self.seconds:.3g} s per step, "
            f"{self.ratio:.2f} times the {self.should:.3g} s {source}"
        )


@dataclass
class StragglerWatch:
    """Fed with every step's busy seconds per rank of the plan.

    Args:
        ranks: of the plan, in the order of the seconds.
        chips: type by rank, for the message.
        expected: predicted busy seconds of a step by rank; empty: the rank's own median of earlier steps.
        factor: a rank is behind when the median of its last steps exceeds this times what is expected.
        batch_size: that ``expected`` is for; 0: any. Steps of another size are judged by the rank's own.
    """

    ranks: Sequence[int]
    chips: Mapping[int, str]
    expected: Mapping[int, float] = field(default_factory=dict)
    factor: float = FACTOR
    batch_size: int = 0

    def __post_init__(self) -> None:
        self._size = 0
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._first: dict[int, list[float]] = {r: [] for r in self.ranks}
        self._recent: dict[int, deque[float]] = {r: deque(maxlen=RECENT) for r in self.ranks}
        self._named: dict[int, int] = {}

    def step(self, busy: Sequence[float], batch_size: int) -> list[Behind]:
        """The ranks that are found to be behind at this step, and were not named lately."""
        if batch_size != self._size:  # another amount of work: begin anew
            self._size = batch_size
            self._begin()
        self._step += 1
        if self._step <= WARM_UP:
            return []
        for rank, seconds in zip(self.ranks, busy, strict=True):
            self._recent[rank].append(seconds)
            if len(self._first[rank]) < BASELINE:
                self._first[rank].append(seconds)
        new = [b for b in self.behind() if self._step >= self._named.get(b.rank, 0)]
        self._named |= {b.rank: self._step + SILENCE for b in new}
        return new

    def behind(self) -> list[Behind]:
        """Every rank that is behind now."""
        stragglers = []
        for rank in self.ranks:
            recent, first = self._recent[rank], self._first[rank]
            predicted = rank in self.expected and self.batch_size in (0, self._size)
            if len(recent) < RECENT or (not predicted and self._step <= WARM_UP + BASELINE):
                continue
            expected_seconds = self.expected[rank] if predicted else median(first)
            seconds = median(recent)
            if seconds > self.factor * expected_seconds:
                steady = min(recent) > self.factor * expected_seconds
                stragglers.append(Behind(rank, self.chips[rank], seconds, expected_seconds, predicted, steady))
        return stragglers


class StragglerReport:
    """Names ranks that fall behind, and stops the run for a new plan, where that was asked for.

    Only the first rank of the plan has something to watch; a stop becomes everyone's at the next step.

    Attributes:
        tell: is told which ranks drifted, by how much, and the run does not stop for it; None: it does.
    """

    def __init__(self, config: RunConfig, reporter: Reporter, exit: ExitConditions) -> None:
        self.config, self.reporter, self.exit = config, reporter, exit
        self._watch: StragglerWatch | None = None
        self._drift: list[Behind] = []  # for which the run stops
        self._reason = ""
        self.tell: Callable[[Mapping[int, float]], None] | None = None
        self._told: dict[int, float] = {}
        failure, plan = config.failure, config.plan
        if reporter.is_first:
            factor = failure.replan_on_drift or FACTOR
            expected, size = reporter.expected_busy, plan.global_batch_size
            self._watch = StragglerWatch(plan.ranks, reporter.chips, expected, factor, size)

    def step(self, step: int, busy: Sequence[float], batch_size: int) -> None:
        """After ``step`` steps; ``busy``: seconds of compute of the last one per rank of the plan."""
        if self._watch is None:
            return
        for behind in self._watch.step(busy, batch_size):
            self.reporter.say(notice_line(f"step {step}: {behind}"))
            self.reporter.event("straggler", str(behind), step=step, rank=behind.rank, ratio=behind.ratio)
        steady = [b for b in self._watch.behind() if b.steady]
        if not self.config.failure.replan_on_drift:
            return
        if self.tell is not None:
            ratios = {b.rank: b.ratio for b in steady}
            if any(ratio > NEWS * self._told.get(rank, 0.0) for rank, ratio in ratios.items()):
                self._told = ratios
                self.tell(ratios)
        elif not self.exit.reason and steady:
            self._drift = steady
            ranks = ", ".join(str(b.rank) for b in steady)
            self.exit.reason = self._reason = f"rank {ranks} drifted from its rate"

    def wants_plan(self, step: int) -> bool:
        """At the end of the run, after ``step`` steps: whether drift is why it stopped, and no signal since. Then the
        launcher is told which ranks."""
        if not self._drift or self.exit.reason != self._reason or step >= self.config.steps:
            return False
        write_drift(self.config, step, self._drift)
        return True


def write_drift(config: RunConfig, step: int, behind: Sequence[Behind]) -> None:
    """For the launcher: which ranks are behind by how much, in the --save directory."""
    assert config.checkpoint.save is not None
    ranks = {str(b.rank): b.ratio for b in behind}
    path = Path(config.checkpoint.save) / DRIFT_FILE
    try:
        path.write_text(json.dumps({"step": step, "dtype": config.dtype, "ratios": ranks}), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", field="--save", value=str(path)) from error


def read_drift(directory: Path) -> dict[str, Any] | None:
    """What ``write_drift`` wrote, which is removed: ``step``, ``dtype``, ``ratios`` by rank; None if nothing."""
    path = directory / DRIFT_FILE
    if not os.path.lexists(path):
        return None
    try:
        drift = read_json_object(path)
    finally:
        with suppress(OSError):
            path.unlink()
    require(drift, _DRIFT, "what a rank that drifted writes", str(path))
    return {**drift, "ratios": {int(rank): float(ratio) for rank, ratio in drift["ratios"].items()}}


EXACT = 20  # nodes with trouble: beyond so many the fewest are no longer searched for, but dropped one by one
Pair = frozenset[str]
_RANK = integer(0, 1 << 20)
_DIAGNOSIS = record(
    {"rank": _RANK, "peers": array(_RANK), "seconds": number(0), "activity": text, "unreachable": array(_RANK)}
)


@dataclass(frozen=True)
class Diagnosis:
    """What one rank saw when it gave up; see ``CommError``. ``unreachable``: ranks that it cannot reach at all."""

    rank: int
    peers: tuple[int, ...]
    seconds: float
    activity: str
    unreachable: tuple[int, ...] = ()

    def __str__(self) -> str:
        peers = ", ".join(map(str, self.peers[:8]))
        return f"rank {self.rank}, in {self.activity}, waited {self.seconds:.1f} s for rank {peers}"


def diagnoses_at(scratch: Path, number: int) -> Path:
    """Where the ranks of round ``number`` leave theirs."""
    return scratch / f"diagnoses-round-{number}"


def leave_diagnosis(error: CommError, where: str | None) -> None:
    """For the launcher; a disk that is full must not hide the error itself.

    Args:
        where: ``LauncherEnvironment.diagnoses``.
    """
    if where is None or error.rank is None:
        return
    from hetero_megatron.comm.connectivity import UNREACHABLE

    cut_off = tuple(sorted(rank for rank, word in error.states.items() if word == UNREACHABLE))
    diagnosis = Diagnosis(error.rank, error.peers, error.seconds, error.activity, cut_off)
    with suppress(OSError):
        Path(where).mkdir(parents=True, exist_ok=True)
        part = Path(where) / f".rank-{error.rank}"
        part.write_text(json.dumps(asdict(diagnosis)), encoding="utf-8")
        part.replace(Path(where) / f"rank-{error.rank}.json")


def say_joined(rank: int, where: str) -> None:
    """To the launcher, once this rank has met all others: from now on it notices when one of them is gone.

    Args:
        where: ``LauncherEnvironment.diagnoses``.
    """
    with suppress(OSError):
        Path(where).mkdir(parents=True, exist_ok=True)
        (Path(where) / f"joined-{rank}").touch()


def take_joined(directory: Path) -> set[int]:
    """The ranks that said so, once; nothing of it stays behind."""
    joined_files = list(directory.glob("joined-*"))
    for path in joined_files:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # diagnoses stay
        directory.rmdir()
    return {int(name) for path in joined_files if (name := path.name.removeprefix("joined-")).isdecimal()}


def read_diagnoses(directory: Path) -> list[Diagnosis]:
    """By rank; those that cannot be read are left out."""
    diagnoses = []
    for path in directory.glob("rank-*.json"):
        with suppress(UserError):
            data = read_json_object(path)
            require(data, _DIAGNOSIS, "what a rank that lost a peer writes", str(path))
            peers, unreachable = tuple(data["peers"]), tuple(data["unreachable"])
            diagnoses.append(Diagnosis(data["rank"], peers, data["seconds"], data["activity"], unreachable))
    return sorted(diagnoses, key=lambda d: d.rank)


def cut_pairs(diagnoses: Sequence[Diagnosis], nodes: Sequence[str], lost: Collection[str] = ()) -> set[Pair]:
    """Pairs of nodes of which one said that it cannot reach the other.

    Args:
        nodes: of each rank.
        lost: nodes that count no more.
    """
    pairs = set()
    for diagnosis in diagnoses:
        for unreachable_rank in diagnosis.unreachable:
            if max(diagnosis.rank, unreachable_rank) < len(nodes):
                pair = frozenset((nodes[diagnosis.rank], nodes[unreachable_rank]))
                if len(pair) == 2 and not pair & set(lost):
                    pairs.add(pair)
    return pairs


def to_drop(pairs: Collection[Pair], nodes: Sequence[str]) -> set[str]:
    """The nodes without which everybody reaches everybody: as few ranks as possible, and late ones rather than early.

    Args:
        nodes: of each rank.
    """
    place = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    troubled = {node for pair in pairs for node in pair}

    def cost(dropped: set[str]) -> tuple[int, list[int]]:
        return sum(node in dropped for node in nodes), sorted(-place[n] for n in dropped)

    def search(left: frozenset[Pair], exact: bool) -> set[str]:
        if not left:
            return set()
        partners = {n: {m for pair in left if n in pair for m in pair - {n}} for n in troubled}
        worst = max(partners, key=lambda n: (len(partners[n]), place[n]))
        without = {worst} | search(frozenset(p for p in left if worst not in p), exact)
        if not exact:
            return without
        removed = partners[worst]  # if the worst one stays, all its partners go
        return min(without, removed | search(frozenset(p for p in left if not p & removed), exact), key=cost)

    return search(frozenset(pairs), len(troubled) <= EXACT)
