"""Elastic runs: whatever happens to ranks, the loss curve and the weights are, bit for bit in fp64, those of a run that
was stopped at the same steps and begun anew under the same plans."""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from hetero_megatron.comm.epochs import EpochStore
from hetero_megatron.comm.job_store import LastingStore
from hetero_megatron.launch.joining import JobFile
from hetero_megatron.monitoring.run_page import read_run, run_page
from hetero_megatron.plans import load_plan
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.memory.replicas import copies_of
from hetero_megatron.spec.presets import load_model
from tests.support.elastic_jobs import Devices, ElasticRun, Happening, Host, final_state, run_elastic, run_segments
from tests.support.selection import quick

HEAD = "version: 1\nseq_length: 16\nglobal_batch_size: 4\npipelines:\n"
# By number of ranks: pipelines, TP and unequal shares, so that what each rank owns is another set of boxes in each.
PLANS = {
    4: """
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: [0, 1], layers: [0, 4], tp: 2, tp_split: [3, 1]},
     {ranks: 2, layers: [4, 6]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 3, layers: [0, 6]}]}
""",
    3: """
  - {micro_batch_size: 1, num_micro_batches: 4, stages: [{ranks: 0, layers: [0, 2]},
     {ranks: [1, 2], layers: [2, 6], tp: 2}]}
""",
    2: """
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: 0, layers: [0, 6]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 6]}]}
""",
    1: """
  - {micro_batch_size: 2, num_micro_batches: 2, stages: [{ranks: 0, layers: [0, 6]}]}
""",
}
STEPS = 9


Plans = Mapping[int, str]


def _plans(directory: Path, plans: Plans = PLANS) -> dict[int, Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = {count: directory / f"plan-{count}.yaml" for count in plans}
    for count, path in paths.items():
        path.write_text(HEAD + plans[count].lstrip("\n"))
    return paths


def _words(directory: Path, *more: str) -> list[str]:
    run = str(directory / "run")
    dtype = () if {"--bf16", "--fp16", "--dtype"} & set(more) else ("--fp64",)
    model = () if "--num-layers" in more else ("--model", "tiny")
    return [
        *(*model, "--mock-data", *dtype, "--lr", "1e-3", "--train-iters", str(STEPS)),
        *("--save", run, "--load", run, "--distributed-timeout-minutes", "0.5", "--no-kernel-check", *more),
    ]


def run(
    directory: Path, ranks: int, happenings: Sequence[Happening], *more: str, grace: float = 30.0,
    hosts: Sequence[Host] = (), plans_by_count: Plans = PLANS, search_seconds: float = 0.0, devices: Devices = (),
) -> ElasticRun:  # fmt: skip
    plans = _plans(directory, plans_by_count)
    words = _words(directory, *(more or ("--peer-replicas-every", "1")))

    def fits(count: int) -> Path | None:
        time.sleep(search_seconds)
        return plans.get(min(count, len(plans)))

    return run_elastic(directory, [plans[ranks]], words, ranks, happenings, fits, grace, hosts=hosts, devices=devices)


def check(
    directory: Path, ranks: int, found: ElasticRun, *more: str, plans_by_count: Plans = PLANS,
    devices_by_count: Mapping[int, Devices] = MappingProxyType({}),
) -> list[int]:  # fmt: skip
    """The run against one that is begun anew at the same steps; returns after which steps these were."""
    assert found.code == 0, found.output
    assert [s["step"] for s in found.steps] == list(range(1, STEPS + 1)), found.output
    page = run_page(read_run(str(directory / "run")))
    assert ("Changes of ranks" in page) == bool(found.epochs)
    assert all(f"after step {step}" in page for _, step in found.epochs)
    counts = [int(re.search(r"; (\d+) ranks? went on", text)[1]) for text, _ in found.epochs]  # type: ignore[index]
    switched = [step for _, step in found.epochs]
    apart = directory / "undisturbed"
    plans = _plans(apart, plans_by_count)
    starts = [(0, ranks)]  # (step, ranks of the plan from there on) of what counts: steps may be done again
    for step, count in zip(switched, counts, strict=True):
        starts = [*(one for one in starts if one[0] < step), (step, count)]
    ends = [*(step for step, _ in starts[1:]), STEPS]
    segments = [(plans[n], n, end) for (_, n), end in zip(starts, ends, strict=True)]
    steps = run_segments(apart, _words(apart, *more), segments, devices_by_count)
    for key in ("loss", "grad_norm", "consumed_samples"):
        assert [s[key] for s in found.steps] == [s[key] for s in steps], key
    mine, theirs = final_state(directory), final_state(apart)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    return switched


@pytest.mark.slow
def test_lost_and_leaving_ranks_change_nothing(tmp_path: Path) -> None:
    """One is killed after a step, one leaves: three plans, and the last step of the lost one is in its neighbour."""
    found = run(tmp_path, 4, [Happening(2, "step", 3), Happening(0, "step", 6, "leave")])
    assert len(found.epochs) == 2, found.output
    switched = check(tmp_path, 4, found)
    assert switched[0] in (2, 3) and switched[1] == 7, found.output
    assert "from memory" in found.epochs[0][0] and "from memory" in found.epochs[1][0]
    nodes = {rank: f"rank{rank}" for rank in range(3)}
    plan = load_plan(str(_plans(tmp_path)[3]), load_model("tiny"))
    predicted = copies_of(plan, make_buckets(plan, load_model("tiny")), "fp64", 2, nodes)
    real = dict(re.findall(r"copies after step 5: rank (\d) has (\d+)", found.output))
    assert {int(rank): int(size) for rank, size in real.items()} == predicted.memory


LATE = Host("late", 1, 2, (Happening(0, "step", 6, "leave"),))


@pytest.mark.exhaustive  # of those that join, CI has the one that comes as a rank dies
def test_a_host_joins_and_leaves(tmp_path: Path) -> None:
    """Two ranks, four after the third step or so, and two again after the sixth."""
    found = run(tmp_path, 2, [Happening(0, "step", 3, "wait")], hosts=[LATE])
    assert len(found.epochs) == 2 and "late joined (2 ranks); 4 ranks went on" in found.epochs[0][0], found.output
    assert check(tmp_path, 2, found)[1] == 7, found.output


NO_COPIES = ("--peer-replicas-every", "0")
# Copies of ranks 0, 1, 2 and 3 of the first plan lie on 1, 2, 3 and 0.
# Name -> (happenings, flags, what the line of the last epoch says, grace)
CASES = {
    "two at once": ([Happening(0, "step", 4), Happening(2, "step", 4)], (), "from memory", 30.0),
    "in the update": ([Happening(1, "update", 4)], (), "from memory", 30.0),
    "before its copy": ([Happening(2, "copy", 5)], (), "from memory", 30.0),
    "while state moves": ([Happening(3, "step", 3), Happening(1, "move", 1)], (), "from memory", 30.0),
    "with its copy": ([Happening(3, "step", 3), Happening(0, "move", 1)], (), "from a checkpoint", 30.0),
    "while groups are made": ([Happening(3, "step", 3), Happening(1, "join", 1)], (), "from memory", 30.0),
    "three in turn": ([Happening(r, "step", 2 * r + 2) for r in range(3)], (), "from memory", 30.0),
    "frozen": ([Happening(1, "step", 4, "freeze")], (), "from memory", 3.0),
    "one leaves as another dies": ([Happening(1, "step", 4, "leave"), Happening(2, "step", 4)], (), "", 30.0),
    "no copies": ([Happening(1, "step", 5)], ("--save-interval", "2", *NO_COPIES), "from a checkpoint", 30.0),
    "copies of every third step": ([Happening(1, "step", 5)], ("--peer-replicas-every", "3"), "from memory", 30.0),
}
EVERY_TIME = ["two at once", "while state moves", "with its copy", "frozen"]


# Experts, and a head that is the embedding, which several stages hold.
EXPERTS = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --max-position-embeddings 64 --vocab-size 257 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --seq-length 16 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 24"
)


# Other states: none beside the weights, masters apart from them, a loss scale, some weights only.
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", quick(["--optimizer sgd --sgd-momentum 0", "--bf16", "--fp16", "--lora-rank 2", EXPERTS], [], ["--bf16"])
)
def test_whatever_the_state_is(words: str, tmp_path: Path) -> None:
    flags = words.split()
    found = run(
        tmp_path, 4, [Happening(1, "step", 4), Happening(3, "step", 6, "leave")], "--peer-replicas-every", "1", *flags
    )
    assert len(check(tmp_path, 4, found, *flags)) == 2 and "from memory" in found.epochs[0][0], found.output


HELD = ["weights: {shard: [1, 3]} --dtype fp64", "activations: {offload: all} --dtype fp32"]


@pytest.mark.parametrize("words", quick(HELD, [], HELD[:1]))
def test_whatever_the_ranks_hold(words: str, tmp_path: Path) -> None:
    """Weights that two ranks divide, and activations that wait in host memory; in fp32, too."""
    what, dtype = words.split(" --dtype ")
    stage = f"ranks: [0, 1], layers: [0, 6], dp_split: [1, 1], {what}"
    plans = {**PLANS, 2: f"  - {{micro_batch_size: 2, num_micro_batches: 2, stages: [{{{stage}}}]}}\n"}
    found = run(
        tmp_path, 2, [Happening(1, "step", 4)], "--dtype", dtype, "--peer-replicas-every", "1", plans_by_count=plans
    )
    assert len(check(tmp_path, 2, found, "--dtype", dtype, plans_by_count=plans)) == 1, found.output
    assert "from memory" in found.epochs[0][0], found.output


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(CASES, [], EVERY_TIME))
def test_whatever_happens(name: str, tmp_path: Path) -> None:
    happenings, flags, said, grace = CASES[name]
    found = run(tmp_path, 4, happenings, *flags, grace=grace)
    check(tmp_path, 4, found)
    assert found.epochs and said in found.epochs[-1][0], found.output


# One rank owns all; the others are lost in what follows a step, with nothing that could tell which step that was.
OWNERS = {
    count: "\n".join(
        f"  - {{micro_batch_size: 1, num_micro_batches: {size}, stages: [{{ranks: {rank}, layers: [0, 6]{share}}}]}}"
        for rank, size, share in zip(range(count), sizes, ["", *[", optimizer: {share: 0}"] * 3], strict=False)
    ) + "\n"
    for count, sizes in {4: (1, 1, 1, 1), 3: (2, 1, 1), 2: (3, 1), 1: (4,)}.items()
}  # fmt: skip
AFTER_STEPS = "--eval-interval 3 --eval-iters 1 --save-interval 7 --check-weight-hash-across-dp-replicas-interval 5"


@pytest.mark.slow
def test_no_step_is_left_out_whatever_follows_it(tmp_path: Path) -> None:
    happenings = [Happening(3, "evaluation", 3), Happening(2, "hashes", 5), Happening(1, "save", 7)]
    flags = AFTER_STEPS.split()
    found = run(tmp_path, 4, happenings, *flags, "--peer-replicas-every", "1", plans_by_count=OWNERS)
    assert check(tmp_path, 4, found, *flags, plans_by_count=OWNERS) == [3, 5, 7], found.output


# Name -> (ranks, happenings, the host that joins, what one of the lines says); of the host's processes 0 and 1.
WAIT = Happening(0, "step", 3, "wait")
JOINING = {
    "as one dies": (2, [WAIT, Happening(1, "step", 3, "wait"), Happening(1, "step", 3)], LATE, "lost rank 1"),
    "and dies at once": (2, [WAIT], Host("late", 1, 2, (Happening(1, "move", 1),)), "lost rank 3 (late, chip 1)"),
    "in place of a lost one": (2, [Happening(1, "step", 1), Happening(0, "step", 5, "wait")],
                               Host("rank1", 3, 1), "rank1 joined (1 rank); 2 ranks went on"),
    "with another program's data": (2, [WAIT], Host("late", 1, 2, words=("--seed", "7")), "lost rank 2 (late, chip 0)"),
}  # fmt: skip


@pytest.mark.slow
def test_a_host_comes_when_all_are_gone(tmp_path: Path) -> None:
    found = run(tmp_path, 1, [Happening(0, "step", 5)], "--save-interval", "2", hosts=[Host("new", 4, 2)])
    check(tmp_path, 1, found)
    assert "no rank is left" in found.output and "new joined (2 ranks); 2 ranks went on" in found.epochs[0][0]
    assert "from a checkpoint" in found.epochs[0][0], found.output


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(JOINING, [], ["as one dies", "in place of a lost one"]))
def test_a_host_joins(name: str, tmp_path: Path) -> None:
    ranks, happenings, host, said = JOINING[name]
    found = run(tmp_path, ranks, happenings, hosts=[host])
    check(tmp_path, ranks, found)
    assert any(said in text for text, _ in found.epochs), found.output


@pytest.mark.exhaustive
def test_the_launcher_is_lost(tmp_path: Path) -> None:
    """Ranks that do not die with it end with a line each; the same command goes on from the last checkpoint."""
    flags, metrics, output = ["--save-interval", "3"], tmp_path / "run" / "metrics.jsonl", tmp_path / "output"
    context = multiprocessing.get_context("forkserver")
    launcher = context.Process(target=run, args=(tmp_path, 4, [], *flags))
    launcher.start()
    end = time.monotonic() + 200
    while not metrics.exists() or metrics.read_text().count('"loss"') < 4:
        assert time.monotonic() < end and launcher.is_alive()
        time.sleep(0.02)
    launcher.kill()
    while output.read_text().count("the launcher does not answer") < 4:
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.1)
    check(tmp_path, 4, run(tmp_path, 4, [], *flags), *flags)


SERVER = """
import sys
from hetero_megatron.comm.job_store import JobStore
store = JobStore()
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_host_whose_launcher_is_gone_says_so_in_one_line(tmp_path: Path) -> None:
    """And nothing of torch's own, which knows C++ only."""
    pipes = {"stdin": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, **pipes) as server:  # type: ignore[call-overload]
        port = int(server.stdout.readline())
        JobFile("127.0.0.1", port, "s" * 32, "", "", [], str(tmp_path)).write(tmp_path)
        words = [sys.executable, "-m", "hetero_megatron", "run", "--join", str(tmp_path), "--node", "late"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, **pipes) as host:  # type: ignore[call-overload]
            store = EpochStore(LastingStore("127.0.0.1", port, 30.0, "elastic"), b"s" * 32)
            end = time.monotonic() + 100
            while store.join_request(0) is None:
                assert time.monotonic() < end and host.poll() is None
                time.sleep(0.05)
            server.kill()
            said = host.stderr.read()
    assert host.returncode == 3 and said == "late: the launcher is gone\n", said


@pytest.mark.slow
def test_a_writer_on_another_host_hangs_and_wakes_up_late(tmp_path: Path) -> None:
    """The job's launcher cannot end it; the others go on without it, and its checkpoint never appears."""
    hosts = [Host("late", 1, 1, (Happening(0, "publish", 6, "doze"),)), Host("other", 4)]
    happenings = [Happening(0, "step", 2, "wait"), Happening(0, "step", 4, "wait"), Happening(0, "step", 5)]
    flags = ["--save-interval", "6", "--distributed-timeout-minutes", "0.1"]
    found = run(tmp_path, 1, happenings, *flags, "--peer-replicas-every", "1", grace=3.0, hosts=hosts)
    check(tmp_path, 1, found, *flags)
    assert "rank 0 (late, chip 0) did not stop in 3 s" in found.output, found.output
    assert "rank 0 ends: the job goes on without it: lost rank 0 (late, chip 0)" in found.output, found.output
    if "went on after step 6" in found.output:  # else those who went on have done it, and saved, again
        assert not (tmp_path / "run" / "iter_0000006").exists(), found.output


FOLLOWS = [
    *("--eval-interval", "3", "--eval-iters", "1", "--save-interval", "4"),
    *("--check-weight-hash-across-dp-replicas-interval", "2"),
]


def random_events(dice: random.Random) -> tuple[list[Happening], list[Host], float]:
    """What happens to four ranks and to hosts that join perhaps, and seconds that a search for a plan takes."""

    def happening(member: int) -> Happening:
        when = dice.choice(["step", "step", "update", "copy", "move", "join", "await", "evaluation", "hashes", "save"])
        at = dice.randint(1, 2) if when in ("move", "join", "await") else dice.randint(2, STEPS - 1)
        at = {"evaluation": 3 * dice.randint(1, 2), "hashes": 2 * dice.randint(1, 4)}.get(when, at)  # as in FOLLOWS
        what = dice.choice(["kill", "leave"]) if when == "step" else dice.choice(["kill", "kill", "kill", "freeze"])
        return Happening(member, when, 4 * dice.randint(1, 2) if when == "save" else at, what)

    struck = dice.sample(range(4), 4 if dice.random() < 0.1 else 3)
    some = [happening(member) for member in struck if dice.random() < 0.6]
    if dice.random() < 0.3:  # a rank and, at once or a step later, the one that has its copy (all of plan 4's)
        first, at = dice.randrange(4), dice.randint(2, STEPS - 3)
        second = Happening((first + 1) % 4, dice.choice(["step", "copy"]), at + dice.randint(0, 1))
        some = [Happening(first, "step", at), second]
    hosts = []
    for name in ("late", "later") if dice.random() < 0.2 else ("late",) if dice.random() < 0.5 else ():
        chips = dice.randint(1, 2)
        own = tuple(happening(index) for index in range(chips) if dice.random() < 0.3)
        hosts.append(Host(name, dice.randint(0, 5), chips, own))
    return some, hosts, dice.choice([0.0, 0.5])


def _check_that_it_ended(found: ElasticRun, happenings: Sequence[Happening]) -> None:
    """Nothing could go on: all ranks are gone, and one line says so; what was done counts once."""
    assert [s["step"] for s in found.steps] == list(range(1, len(found.steps) + 1)), found.output
    assert {one.member for one in happenings} == set(range(4)) and found.output.count("no rank is left") == 1


SEQUENCES = list(range(1, 201))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", quick(SEQUENCES, [], SEQUENCES[:1]))
def test_random_events(seed: int, tmp_path: Path) -> None:
    happenings, hosts, search_seconds = random_events(random.Random(seed))
    # Who is frozen costs the others so long; a rank of a busy machine may take seconds to stop.
    found = run(tmp_path, 4, happenings, *FOLLOWS, grace=12.0, hosts=hosts, search_seconds=search_seconds)
    try:
        if found.code:
            _check_that_it_ended(found, happenings)
        else:
            check(tmp_path, 4, found, *FOLLOWS)
    except BaseException:
        print(f"{happenings}, {hosts}")
        raise
    shutil.rmtree(tmp_path / "run")
