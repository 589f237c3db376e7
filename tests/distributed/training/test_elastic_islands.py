"""Elastic runs with outer steps: islands are lost and come back without a restart, and the others' losses and states
are, bit for bit in fp64, those of a run that was stopped at the same steps and begun anew with the islands that were
there."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from hetero_megatron.plans import load_plan
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.memory.replicas import copies_of
from hetero_megatron.spec.presets import load_model
from tests.support.elastic_jobs import Devices, ElasticRun, Happening, Host, final_state, run_elastic, run_segments
from tests.support.selection import quick

# Exchanges end after steps 2, 4, 6, …; with a delay they begin a step before.
PLAN = """
version: 1
seq_length: 16
global_batch_size: 4
outer: {{islands: {islands}, every: 4, fragments: 2, mixing: 0.25{more}}}
pipelines:
  - {{micro_batch_size: 1, num_micro_batches: 3,
     stages: [{{ranks: {a}, layers: [0, 4]}}, {{ranks: {b}, layers: [4, 6]}}]}}
  - {{micro_batch_size: 1, num_micro_batches: 1, stages: [{{ranks: {c}, layers: [0, 6]}}]}}
"""
FIRST_OF_TWO = PLAN.format(islands='["0-1", 2]', a=0, b=1, c=2, more="")
WITHOUT_LAST = re.sub("  - .*2, layers.*", "", FIRST_OF_TWO).replace('["0-1", 2]', '["0-1"]').replace(": 3,", ": 4,")
MIRRORED = PLAN.format(islands='[0, "1-2"]', a=1, b=2, c=0, more="")
WITHOUT_PAIR = re.sub("  - .*3,\n.*", "", MIRRORED).replace('[0, "1-2"]', "[0]").replace("batches: 1", "batches: 4")
STEPS = 13


def words(directory: Path, *more: str) -> list[str]:
    run = str(directory / "run")
    return [
        *("--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--train-iters", str(STEPS), "--save", run),
        *("--load", run, "--no-kernel-check", "--eval-interval", "5", "--eval-iters", "1", *more),
        *(() if "--distributed-timeout-minutes" in more else ("--distributed-timeout-minutes", "0.5")),
    ]


def run(
    directory: Path, plan: str, happenings: Sequence[Happening], hosts: Sequence[Host] = (), more: Sequence[str] = (),
    devices: Devices = (),
) -> ElasticRun:  # fmt: skip
    found = attempt(directory, plan, happenings, hosts, more, devices)
    assert found.code == 0, found.output
    assert [s["step"] for s in found.steps] == list(range(1, STEPS + 1)), found.output
    assert [s["consumed_samples"] for s in found.steps] == [4 * step for step in range(1, STEPS + 1)]
    assert all(math.isfinite(s["loss"]) for s in found.steps)
    return found


def attempt(
    directory: Path, plan: str, happenings: Sequence[Happening], hosts: Sequence[Host], more: Sequence[str],
    devices: Devices = (),
) -> ElasticRun:  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "plan.yaml").write_text(plan)
    islands = [(0, 1), (2,)] if plan != MIRRORED else [(0,), (1, 2)]
    return run_elastic(
        directory, [directory / "plan.yaml"], words(directory, *more), 3, happenings, None, 12.0, hosts=hosts,
        islands=islands, devices=devices,
    )  # fmt: skip


def check(
    directory: Path, found: ElasticRun, segments: Sequence[tuple[str, int, int]],
    devices_by_count: Mapping[int, Devices] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Against runs of these plans (text, ranks, last step), each from the checkpoint of the one before."""
    apart, files = directory / "apart", []
    apart.mkdir()
    for i, (plan, ranks, last) in enumerate(segments):
        file = apart / f"plan-{i}.yaml"
        file.write_text(plan)
        files.append((file, ranks, last))
    steps = run_segments(apart, words(apart), files, devices_by_count)
    for key in ("loss", "grad_norm"):
        assert [s[key] for s in found.steps] == [s[key] for s in steps], key
    mine, theirs = final_state(directory), final_state(apart)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("copies", quick(["1", "0"], [], ["0"]))
def test_an_island_is_lost_and_comes_back(copies: str, tmp_path: Path) -> None:
    happenings = [Happening(2, "step", 5), Happening(0, "step", 8, "wait")]
    found = run(tmp_path, FIRST_OF_TWO, happenings, [Host("rank2", 8)], ("--peer-replicas-every", copies))
    lost, back = found.epochs
    assert "island 1 is left out, with up to" in lost[0] and "2 ranks went on after step 5 from memory" in lost[0]
    assert "rank2 joined (1 rank); 3 ranks went on" in back[0] and "island 1 begins from the global weights" in back[0]
    check(tmp_path, found, [(FIRST_OF_TWO, 3, 5), (WITHOUT_LAST, 2, back[1]), (FIRST_OF_TWO, 3, STEPS)])
    if copies == "1":
        spec = load_model("tiny")
        plan = load_plan(str(tmp_path / "plan.yaml"), spec)
        predicted = copies_of(plan, make_buckets(plan, spec), "fp64", 2, {rank: f"rank{rank}" for rank in range(3)})
        real = dict(re.findall(r"copies after step 4: rank (\d) has (\d+)", found.output))
        assert {int(rank): int(size) for rank, size in real.items()} == predicted.memory


@pytest.mark.exhaustive
def test_an_island_on_another_host_is_frozen_and_comes_back(tmp_path: Path) -> None:
    """It is waited for as long as the time-out says, and wakes up when the others have taken more outer steps."""
    happenings = [Happening(2, "step", 1), Happening(0, "step", 3, "wait"), Happening(0, "step", 9, "wait")]
    frozen = Host("rank2", 3, what=(Happening(0, "step", 6, "doze"),))
    more = ("--distributed-timeout-minutes", "0.1")
    found = run(tmp_path, FIRST_OF_TWO, happenings, [frozen, Host("rank2", 9)], more)
    lost, back, late, again = (text for text, _ in found.epochs)
    assert "island 1 is left out" in lost and "island 1 is left out" in late, found.output
    assert "begins from the global weights" in back and "begins from the global weights" in again, found.output


@pytest.mark.slow
def test_whichever_island_is_lost(tmp_path: Path) -> None:
    """The second one goes on with its own weights and moments as the first one of the mirrored plan does."""
    one = run(tmp_path / "one", FIRST_OF_TWO, [Happening(0, "step", 5), Happening(1, "step", 5)])
    other = run(tmp_path / "other", MIRRORED, [Happening(1, "step", 5), Happening(2, "step", 5)])
    assert [step for _, step in one.epochs] == [step for _, step in other.epochs] == [5], one.output
    assert "island 0 is left out" in one.epochs[0][0] and "island 1 is left out" in other.epochs[0][0]
    assert [s["loss"] for s in one.steps] == pytest.approx([s["loss"] for s in other.steps], rel=1e-12)
    check(tmp_path / "other", other, [(MIRRORED, 3, 5), (WITHOUT_PAIR, 1, STEPS)])


@pytest.mark.slow
def test_an_exchange_that_was_due_is_made_by_who_is_left(tmp_path: Path) -> None:
    """Of an island of one rank, without copies: the step counts, and its line is in the log."""
    found = run(tmp_path, MIRRORED, [Happening(1, "exchange", 6)], more=("--peer-replicas-every", "0"))
    (text, step), = found.epochs
    assert "the exchange that was due is made by those who are there" in text and step == 6, found.output
    assert found.steps[-1]["loss"] < found.steps[4]["loss"]


TORN = {
    "in the exchange": ("", Happening(2, "exchange", 6)),
    "in an exchange beside the computing": (", delay: 1, compress: int8", Happening(2, "step", 5)),
    "one rank of it": ("", Happening(1, "step", 5)),
    "frozen": ("", Happening(2, "step", 5, "freeze")),
    "while the global weights are evaluated": ("", Happening(2, "evaluation", 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(TORN, [], ["in the exchange", "one rank of it"]))
def test_an_island_is_lost(case: str, tmp_path: Path) -> None:
    """At moments of which there is no run that was stopped: no step is left out or taken twice, and what is left goes
    on to learn. Which numbers come out of it: tests/distributed/parallel/test_islands_leave.py."""
    options, happening = TORN[case]
    plan = PLAN.format(islands='["0-1", 2]', a=0, b=1, c=2, more=options)
    more = ("--distributed-timeout-minutes", "0.1") if happening.what == "freeze" else ()
    found = run(tmp_path, plan, [happening], more=more)
    (text, step), = found.epochs
    assert "from memory" in text and f"island {0 if happening.member == 1 else 1} is left out" in text, found.output
    assert step in (5, 6) and found.steps[-1]["loss"] < found.steps[4]["loss"]


# Random events: what is in no exact comparison holds, too.
WHENS = ("step", "step", "update", "exchange", "copy", "move", "join", "await", "evaluation", "save")


def random_events(dice: random.Random) -> tuple[list[Happening], list[Host]]:
    """What happens to three ranks, and to hosts that join, which are those of islands that may be lost by then."""

    def happening(member: int) -> Happening:
        when = dice.choice(WHENS)
        at = dice.randint(1, 2) if when in ("move", "join", "await") else dice.randint(2, STEPS - 1)
        at = {"evaluation": 5 * dice.randint(1, 2), "save": 4 * dice.randint(1, 2)}.get(when, at)
        # Nobody would see that the only rank which is left is frozen.
        others = ["kill"] if member == 2 else ["kill", "kill", "kill", "freeze"]
        return Happening(member, when, at, dice.choice(["kill", "leave"] if when == "step" else others))

    some = [happening(member) for member in dice.sample(range(3), 2) if dice.random() < 0.8]
    hosts = []
    for rank in dice.sample(range(3), dice.randint(0, 2)):
        own = (replace(happening(2), member=0),) if dice.random() < 0.3 else ()
        hosts.append(Host(f"rank{rank}", dice.randint(1, 8), 1, own))
    return some, hosts


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(1, 61))
def test_random_events(seed: int, tmp_path: Path) -> None:
    """Each step is done once, with the next samples, or there is nobody who could do it, and one line says so."""
    dice = random.Random(seed)
    happenings, hosts = random_events(dice)
    options = dice.choice(["", ", delay: 1", ", compress: int4", ", delay: 1, compress: int8"])
    copies = ("--peer-replicas-every", str(dice.choice([0, 1, 1, 3])))
    plan = PLAN.format(islands='["0-1", 2]', a=0, b=1, c=2, more=options)
    try:
        found = attempt(tmp_path, plan, happenings, hosts, (*copies, "--save-interval", "4"))
        done = [s["step"] for s in found.steps]
        over = found.code or "all were told to leave" in found.output
        assert done == list(range(1, (len(done) if over else STEPS) + 1)), found.output
        assert [s["consumed_samples"] for s in found.steps] == [4 * step for step in done]
        assert all(math.isfinite(s["loss"]) for s in found.steps)
        assert not found.code or re.search("no rank is left|no plan for the", found.output), found.output
    except BaseException:
        print(f"{happenings}, {hosts}, {options}, {copies}")
        raise
    shutil.rmtree(tmp_path / "run")
