"""--elastic: what a run must have, and what cannot be left and taken up again inside a process."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.predict import main as predict
from hetero_megatron.cli.pretrain import main as pretrain
from hetero_megatron.cli.run import main
from hetero_megatron.cli.run_torchrun import run_words
from hetero_megatron.errors import UserError
from hetero_megatron.launch.in_place import InPlaceSupervisor
from hetero_megatron.training.config import ElasticConfig, RunConfig

BASE = "--model tiny --mock-data --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3"
SAVES = "--save runs/a --load runs/a"
STREAM = "--data-path README.md --dataloader-type streaming"
PLAN = """
version: 1
seq_length: 32
global_batch_size: 4
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 4, stages: [{ranks: 0, layers: [0, 3]}, {ranks: 1, layers: [3, 6]}]}
"""

CLUSTER = """
version: 1
nodes:
  - {name: small, count: 1, chip: c, host_memory: 10 MB}
  - {name: large, count: 1, chip: c, host_memory: 1 GB}
chips: {c: {memory: 1 GiB, emulate: {speed: 0.5}}}
links: {inter_node: {bandwidth: 50 MB/s}}
"""


def run(words: str, supervised: bool = True) -> RunConfig:
    environment = {"HETERO_LAUNCHER": "1"} if supervised else {}
    return configure(words.split(), {"WORLD_SIZE": "1", "RANK": "0", **environment})


def test_what_an_elastic_run_has() -> None:
    assert run(BASE).elastic is None
    assert run(f"{BASE} --elastic {SAVES} --peer-replicas-every 0").elastic == ElasticConfig(None)
    assert run(f"{BASE} --elastic {SAVES}").elastic == run(f"{BASE} --elastic").elastic == ElasticConfig(1)
    assert run(f"{BASE} --elastic --peer-replicas-every 3").elastic == ElasticConfig(3)


def test_what_cannot_go_on_is_refused_by_name() -> None:
    copies = f"{BASE} --elastic --peer-replicas-every 1"
    for words, field, problem in (
        (f"{BASE} --elastic --peer-replicas-every 0", "--peer-replicas-every", "lost with it"),
        (f"{copies} --save runs/a", "--elastic", "go on from what is there"),
        (f"{copies} --save runs/a --load runs/b", "--elastic", "go on from what is there"),
        (f"{copies} {SAVES} --finetune", "--elastic", "go on from what is there"),
        (f"{copies} {SAVES} --profile", "--profile", "one run of the processes"),
        (f"{copies} --wandb-project p", "--wandb-project", "one run of the processes"),
        (f"{copies} --dump-layers d", "--dump-layers", "one run of the processes"),
        (f"{copies} --exit-signal-handler", "--exit-signal-handler", "leave"),
        (f"{copies} --peer-replicas-every -1", "--peer-replicas-every", ""),
        (f"{copies.replace('--mock-data', STREAM)}", "--elastic", "stream"),
    ):
        with pytest.raises(UserError) as error:
            run(words)
        assert field in str(error.value) and problem in str(error.value), (words, str(error.value))
    with pytest.raises(UserError, match="torchrun"):
        run(copies, supervised=False)


def test_what_the_launcher_refuses_beside_it(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    rest = ["--plan", str(plan), "--fallback-plan", str(plan)]
    flags = ["--", "--model", "tiny", "--mock-data", "--train-iters", "2", "--lr", "1e-3"]
    ssh = ["--via", "ssh", "--cluster", "c", "--rejoin", "5"]
    for words, field in ((ssh, "--rejoin"), (["--on-failure", "restart"], "--on-failure")):
        with pytest.raises(UserError) as error:
            main(["--elastic", *rest, *words, *flags])
        assert error.value.field == field and "contradicts --elastic" in str(error.value)
    with pytest.raises(UserError, match="lost with it"):
        main(["--elastic", *rest, *flags, "--peer-replicas-every", "0"])
    with pytest.raises(UserError, match=r"--address = 203.0.113.1: this host cannot listen there \(Cannot assign"):
        main(["--elastic", *rest, "--address", "203.0.113.1", *flags])
    testbed = ["--elastic", *rest, "--testbed"]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("10 MB", "1 GB"))
    for words, field in (
        (["--chips", "none"], "--testbed"),
        (["--cluster", str(cluster), "--links", "paced"], "--links"),
        (["--cluster", str(cluster), "--links", "fast"], "--links"),
        (["--cluster", str(cluster), "--address", "127.0.0.1"], "--address"),
    ):
        with pytest.raises(UserError) as error:
            main([*testbed, *words, *flags])
        assert error.value.field == field
    with pytest.raises(UserError, match="belongs before --"):
        main([*rest, *flags, "--elastic"])


def test_what_is_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    for words, said in (
        (["--join", "runs/a"], "--join: torchrun has started this process as a worker"),
        (["--elastic", "--via=ssh", "--"], "--via: torchrun has started"),
        (["--elastic", "--testbed", "--"], "--testbed: torchrun has started"),
        (["--plan", "p", "--", "--elastic"], "one of several workers, but it starts all ranks by itself"),
        (["--elastic", "--plan", "p", "--"], "LOCAL_RANK and LOCAL_WORLD_SIZE: not set"),
    ):
        with pytest.raises(UserError) as error:
            main(words)
        assert said in str(error.value), (words, str(error.value))
    for words, said in (
        ("--elastic --cluster c", "--plan: missing beside --elastic under torchrun"),
        ("--elastic --plan=p --model tiny", "or torchrun ... -m hetero_megatron run --elastic --fallback-plan"),
    ):
        with pytest.raises(UserError) as error:
            run_words(words.split())
        assert said in str(error.value), (words, str(error.value))
    words = "--model tiny --elastic --plan=p --cluster c --lr 1"
    assert " ".join(run_words(words.split())) == "--elastic --plan p --cluster c -- --model tiny --lr 1"


def test_what_a_host_is_refused_that_joins(tmp_path: Path) -> None:
    job = '{"host": "127.0.0.1", "port": 1, "secret": "s", "plan": "p", "cluster": "", "words": [], "folder": "."}'
    cases = [
        ("", [], "no elastic job runs there"),
        ("{}", [], "host: is missing"),
        (job.replace("[]", "[1]"), [], "words"),
        (job, ["--node", "a"], "its launcher does not answer at 127.0.0.1:1"),
        (job.replace('"cluster": ""', '"cluster": "nowhere.yaml"'), [], "nowhere.yaml"),
        (job, ["--nproc-per-node", "0"], "--nproc-per-node = 0"),
        (job, ["--nproc-per-node", "two"], "--nproc-per-node = two"),
        (job, ["--plan", "p"], "--plan: unknown flag beside --join"),
        (job, ["--node"], "--node: has no value"),
    ]
    for text, words, said in cases:
        (tmp_path / "elastic.json").unlink(missing_ok=True)
        if text:
            (tmp_path / "elastic.json").write_text(text)
        with pytest.raises(UserError) as error:
            main(["--join", str(tmp_path), *words])
        assert said in str(error.value) and "\n" not in str(error.value), (said, str(error.value))


def test_a_dry_run_says_what_copies_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    words = f"--dry-run --model tiny --plan {plan} --elastic --peer-replicas-every 4".split()
    assert pretrain(words, {}) == 0
    out = capsys.readouterr().out
    # Two ranks with 12 bytes of every element that they own: each holds its own and the other's, of two moments.
    assert "copies for peers: up to " in out and "every 4 steps up to " in out
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("c: {memory: 1 GiB, emulate: {speed: 0.5}}", "").replace("chip: c", "chip: A10"))
    assert pretrain([*words, "--cluster", str(cluster), "--allow-over-memory"], {}) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("copies for peers"))
    assert "on the links beside the next step" in line and "node small has" in line, line
    words = ["--plan", str(plan), "--cluster", str(cluster), "--model", "tiny", "--dtype", "fp32"]
    assert predict([*words, "--peer-replicas-every", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert predict([*words, "--peer-replicas-every", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peer_copies"]["holders"] == {"0": 1, "1": 0}


def test_copies_are_made_where_host_memory_has_room(tmp_path: Path) -> None:
    """Each of two ranks holds two moments of its own state and the other's."""
    plan, cluster = tmp_path / "plan.yaml", tmp_path / "cluster.yaml"
    plan.write_text(PLAN)

    def two(words: str) -> RunConfig:
        cluster.write_text(CLUSTER)
        flags = f"--model tiny --mock-data --train-iters 2 --lr 1e-3 --elastic --plan {plan} --cluster {cluster}"
        return configure([*flags.split(), *words.split()], {"WORLD_SIZE": "2", "RANK": "0", "HETERO_LAUNCHER": "1"})

    config = two(SAVES)
    assert config.elastic is not None and config.elastic.replicas_every is None
    assert "node small needs" in config.notices[-1] and "too little; there are none" in config.notices[-1]
    for words in ("", f"{SAVES} --peer-replicas-every 2"):
        with pytest.raises(UserError, match="do not fit: node small"):
            two(words)
    config = two("--peer-replicas-every 2 --allow-over-memory")
    assert config.elastic == ElasticConfig(2, {"small": 10_000_000, "large": 1_000_000_000})


@pytest.mark.slow
def test_the_launcher_locks_the_directory_for_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging rank of another host could keep it for ever; what another run holds is refused before ranks start."""
    started: list[bool] = []

    def launched(self: InPlaceSupervisor) -> None:
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        started.append(True)

    monkeypatch.setattr(InPlaceSupervisor, "__post_init__", launched)
    monkeypatch.setattr(InPlaceSupervisor, "run", lambda self: 0)
    plan, save = tmp_path / "plan.yaml", str(tmp_path)
    plan.write_text(PLAN)
    words = ["--elastic", "--plan", str(plan), "--fallback-plan", str(plan), "--", "--model", "tiny", "--mock-data"]
    words += ["--train-iters", "2", "--lr", "1e-3", "--save", save, "--load", save]
    handle = os.open(save, os.O_RDONLY)
    assert main(words) == 0 and started
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back
    with pytest.raises(UserError, match="another run is writing there"):
        main(words)
    assert len(started) == 1
    os.close(handle)
