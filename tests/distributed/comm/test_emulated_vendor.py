"""The emulated vendor: a device with its own memory, streams and library, on which missing waits are found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import emulated_jobs as jobs
from tests.support.parity import check_case, fixed_case
from tests.support.paths import ROOT
from tests.support.pool import Pool
from tests.support.quick_start import serving

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), jobs.PLUGIN]),
    "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


INTERPRETER = Path(sys.executable)
EMULATED_RANKS = 4
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


@pytest.fixture(scope="module")
def forked() -> Iterator[Path]:
    """An interpreter that starts at once."""
    with serving(ENVIRONMENT) as programs:
        yield programs / "python"


def call(*command: str, timeout: float = 300, python: Path = INTERPRETER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *command], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=timeout
    )


@pytest.fixture(scope="module")
def found(extension: None) -> dict[str, list[str]]:
    """By program: what the device says to the wrong one and to the right one."""
    done = call("-m", "tests.support.emulated_jobs", "all_attempts")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bug", jobs.BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found_and_named(bug: jobs.Planted, found: dict[str, list[str]]) -> None:
    wrong, _ = found[bug.__name__]
    for words in jobs.BUGS[bug]:
        assert words in wrong


@pytest.mark.parametrize("bug", jobs.BUGS, ids=lambda bug: bug.__name__)
def test_the_corrected_program_is_clean(bug: jobs.Planted, found: dict[str, list[str]]) -> None:
    assert found[bug.__name__][1] == ""


def test_host_code_that_touches_device_memory_faults() -> None:
    done = call("-m", "tests.support.emulated_jobs", "touch_device_memory")
    assert done.stdout.strip() == "values [1.0, 1.0, 1.0, 1.0]"
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.slow
def test_it_passes_the_conformance_kit() -> None:
    done = call("-m", "hetero_megatron.cli.main", "plugins", "check", "emulated_vendor", "--json", "--no-speed")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and {f["status"] for f in report["findings"]} == {"pass"}


@pytest.mark.parametrize("bug", jobs.TRANSFER_BUGS, ids=lambda bug: bug.__name__)
def test_bugs_around_transfers(bug: Any, pool: Pool) -> None:
    """Every rank of a pair plants it; both must find it, and find nothing in the corrected program."""
    for words, clean in pool.run(jobs.attempt_on_ranks, bug):
        for word in jobs.TRANSFER_BUGS[bug]:
            assert word in words
        assert clean == ""


def test_host_tensors_and_foreign_ranks_are_refused(pool: Pool) -> None:
    for host, foreign in pool.run(jobs.refusals):
        assert "No backend type associated with device type cpu" in host
        assert re.search(r"member \d of the group is a foreign rank, of the vendor (other|emulated)", foreign)


def test_ranks_without_the_library_are_waited_for_no_longer_than_the_time_out(pool: Pool) -> None:
    answers = pool.run(jobs.one_comes_alone)
    assert "did not come within 500 ms: it is not of the vendor emulated, or it is dead" in answers[0]


def test_collectives_move_what_they_should(pool: Pool) -> None:
    assert pool.run(jobs.collectives) == [""] * 4


def test_a_silent_peer_fails_the_transfer_in_time(pool: Pool) -> None:
    """And not the host, which waits for its device only."""
    assert "Timed out" in pool.run(jobs.nobody_sends)[0]


def test_an_abort_ends_what_waits_for_a_lost_peer(pool: Pool) -> None:
    assert pool.run(jobs.abort_ends_it) == [""] * 4


def stage(*ranks: int, layers: tuple[int, int], **more: Any) -> dict[str, Any]:
    return {"ranks": list(ranks), "layers": list(layers), **more}


def plan_of(*pipelines: list[dict[str, Any]]) -> dict[str, Any]:
    each = [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": stages} for stages in pipelines]
    size = 2 * len(pipelines)
    return {"version": 1, "seq_length": 8, "global_batch_size": size, "schedule": "1f1b", "pipelines": each}


CONTEXT = [{"ranks": [0, 1], "tokens": [5, 3], "heads": [2, 2]}]
PLANS = {
    "one rank": plan_of([stage(0, layers=(0, 4))]),
    "pipeline of two": plan_of([stage(0, layers=(0, 1)), stage(1, layers=(1, 4))]),
    "uneven tensor parallelism": plan_of([stage(0, 1, layers=(0, 4), tp=2, tp_split=[3, 1])]),
    "context": plan_of([stage(0, 1, layers=(0, 4), context=CONTEXT)]),
    "pipeline of four": plan_of([stage(r, layers=(r, r + 1)) for r in range(4)]),
    "replicas that are cut elsewhere": plan_of(
        [stage(0, layers=(0, 3)), stage(1, layers=(3, 4))], [stage(2, layers=(0, 1)), stage(3, layers=(1, 4))]
    ),
    "tensor parallelism and replicas": plan_of(
        [stage(0, 1, layers=(0, 2), tp=2), stage(2, layers=(2, 4))], [stage(3, layers=(0, 4))]
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_parity(name: str, pool: Pool) -> None:
    """With one process on the host: losses and norms to 1e-12, gradients and weights to 1e-9. A missing wait anywhere
    in the runtime would have raised."""
    check_case(fixed_case(LLAMA, PLANS[name], dtype="fp64"), pool)


RUN = [
    "pretrain_gpt.py", "--model", "tiny", "--mock-data", "--seq-length", "32", "--fp64", "--seed", "7",
    "--global-batch-size", "4", "--lr", "1e-3", "--train-iters", "3",
]  # fmt: skip
TWO_BY_TWO = """
version: 1
seq_length: 32
global_batch_size: 4
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2, tp_split: [3, 1], recompute: {first: 1}}
      - {ranks: [2, 3], layers: [4, 6], context: [{ranks: [2, 3], tokens: [20, 12], heads: [4, 4]}]}
"""


def losses(python: Path, directory: Path, *words: str, ranks: int = 1) -> list[float]:
    """Of a whole run of the program, which says nothing of a race."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = call(*launcher, *RUN, *words, "--save", str(directory), python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "race" not in done.stderr, done.stderr
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.mark.slow
def test_the_program_trains_on_it_and_its_checkpoint_goes_on_on_the_host(forked: Path, tmp_path: Path) -> None:
    one = ("--micro-batch-size", "2")
    (tmp_path / "plan.yaml").write_text(TWO_BY_TWO)
    host = losses(forked, tmp_path / "host", "--platform", "cpu", *one)
    assert len(host) == 3
    four = ("--platform", "emulated_vendor", "--plan", str(tmp_path / "plan.yaml"), "--exit-interval", "2")
    assert losses(forked, tmp_path / "four", *four, ranks=4) == pytest.approx(host[:2], rel=1e-11)
    resumed = losses(forked, tmp_path / "four", "--platform", "cpu", *one, "--load", str(tmp_path / "four"))
    assert resumed == pytest.approx(host, rel=1e-11)


@pytest.mark.slow
def test_generation_takes_the_platforms_kernels(forked: Path, tmp_path: Path) -> None:
    call("examples/small_chat_model.py", str(tmp_path), python=forked)
    words = ("-m", "hetero_megatron", "generate", "--load-hf", str(tmp_path / "base"), "--prompt", "hello", "--json")
    answers = []
    for platform in ("cpu", "emulated_vendor"):
        done = call(*words, "--max-new-tokens", "6", "--platform", platform, python=forked)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["answers"])
    assert answers[0] == answers[1] and len(answers[0][0]["tokens"]) == 6
