"""What a launcher's environment says: whatever is wrong is refused at once, by name, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.cli.pretrain import main
from hetero_megatron.environment.launcher import LauncherEnvironment, is_first, read_launcher, refuse_copies
from hetero_megatron.errors import UserError
from hetero_megatron.training.rank_platform import open_to_others
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT

FLAGS = ["--model", "tiny", "--mock-data", "--seq-length", "32", "--micro-batch-size", "1", "--train-iters", "1"]
TWO = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in TWO.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        *[({**TWO, name: ""}, name) for name in TWO],
        *[({**TWO, name: "x"}, name) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")],
        *[({**TWO, name: "1.0"}, name) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")],
        *[({**TWO, name: "-1"}, name) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")],
        *[({**TWO, name: "٣"}, name) for name in ("WORLD_SIZE", "RANK")],  # a digit, but not one of ours
        *[({**TWO, "MASTER_PORT": port}, "MASTER_PORT") for port in ("0", "65536", "70000", "9" * 5000)],
        *[(without(name), name) for name in TWO if name != "WORLD_SIZE"],
        ({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": "1", "MASTER_PORT": "29500"}, "WORLD_SIZE"),
        ({**TWO, "RANK": "2"}, "RANK"), ({**TWO, "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({**TWO, "WORLD_SIZE": "70000", "RANK": "1"}, "WORLD_SIZE"), ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK"), ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({**TWO, "LOCAL_RANK": "-1"}, "LOCAL_RANK"), ({**TWO, "LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ({**TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK"),
        ({**TWO, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"), ({**TWO, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({**TWO, "MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR"),
        ({**TWO, "MASTER_ADDR": "127.0.0.1:29500"}, "MASTER_ADDR"), ({**TWO, "MASTER_ADDR": "a b"}, "MASTER_ADDR"),
        ({**TWO, "MASTER_ADDR": "tcp://127.0.0.1"}, "MASTER_ADDR"), ({**TWO, "MASTER_ADDR": "x" * 300}, "MASTER_ADDR"),
        ({**TWO, "TORCHELASTIC_RESTART_COUNT": "one"}, "TORCHELASTIC_RESTART_COUNT"),
        ({**TWO, "TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT"),
        ({**TWO, "TORCHELASTIC_USE_AGENT_STORE": "yes"}, "TORCHELASTIC_USE_AGENT_STORE"),
        ({"HETERO_NODE": " "}, "HETERO_NODE"), ({"HETERO_NODE": "a\x1b[31m"}, "HETERO_NODE"),
        ({"HETERO_LAUNCHER": "true"}, "HETERO_LAUNCHER"), ({"HETERO_DIAGNOSES": ""}, "HETERO_DIAGNOSES"),
        ({"HETERO_TESTBED": "/no/such/file"}, "HETERO_TESTBED"), ({"HETERO_TESTBED": "/dev/zero"}, "HETERO_TESTBED"),
        ({"HETERO_TESTBED_DIR": "/no/such/directory"}, "HETERO_TESTBED_DIR"),
        ({"HETERO_JOB_SECRET": ""}, "HETERO_JOB_SECRET"), ({"HETERO_JOB_SECRET": "hunter2"}, "HETERO_JOB_SECRET"),
    ],
    ids=lambda value: ",".join(f"{k}={v[:24]}" for k, v in value.items()) if isinstance(value, dict) else value,
)  # fmt: skip
def test_what_is_wrong_is_named_at_once(
    environment: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(FLAGS, environment) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and named in line and "hunter2" not in line


def test_no_torch_is_needed_for_that() -> None:
    code = "import sys; from hetero_megatron.cli.pretrain import main; code = main(sys.argv[1:]); "
    code += "print(code, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *FLAGS], cwd=ROOT, env={**ENVIRONMENT, **TWO, "RANK": "7"}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"], done


def test_what_launchers_set_is_read() -> None:
    """As torchrun does, with agents of two nodes, and as a shell does for one process."""
    more = {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3", "HETERO_NODE": "fast-1",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "HETERO_JOB_SECRET": "s" * 32, "MASTER_ADDR": "::1",
    }  # fmt: skip
    found = read_launcher({**TWO, **more})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 0, 1)
    assert (found.address, found.port, found.restarts, found.node) == ("::1", 29500, 3, "fast-1")
    assert found.agent_store and found.one_host and found.secret == b"s" * 32 and "sss" not in repr(found)
    assert read_launcher({}) == LauncherEnvironment()
    assert read_launcher({"LOCAL_RANK": "3"}).device_index == 3
    assert read_launcher({"WORLD_SIZE": "1"}).world_size == 1
    assert read_launcher({"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}).world_size == 1  # exported, for other uses


def test_what_the_testbed_and_the_supervisor_set_is_read(tmp_path: Path) -> None:
    (tmp_path / "testbed.json").write_text("{}")
    file, folder, found = str(tmp_path / "testbed.json"), str(tmp_path), str(tmp_path / "not yet there")
    me = read_launcher({"HETERO_TESTBED": file, "HETERO_TESTBED_DIR": folder, "HETERO_DIAGNOSES": found})
    assert (me.testbed, me.testbed_directory, me.diagnoses) == (file, folder, found)
    alone = read_launcher({})
    assert (alone.testbed, alone.testbed_directory, alone.diagnoses) == (None, None, None)


def test_one_process_speaks_for_the_job_before_anything_is_checked() -> None:
    task = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    spoken = [{}, {"RANK": "0"}, {"RANK": "0", "SLURM_PROCID": "1"}, task]
    silent = [{"RANK": "3"}, {"RANK": "x"}, task | {"SLURM_PROCID": "3"}]
    assert [is_first(e) for e in (*spoken, *silent)] == [True] * 4 + [False] * 3


def test_where_all_ranks_are_on_one_host() -> None:
    def read(address: str, **more: str) -> LauncherEnvironment:
        return read_launcher({**TWO, "MASTER_ADDR": address, **more}, joins=False)

    assert read("localhost").one_host and read("127.3.2.1").one_host and not read("10.0.0.1").one_host
    assert read("10.0.0.1", LOCAL_WORLD_SIZE="2").rendezvous_address == ("127.0.0.1", 29500)
    agent = read("10.0.0.1", LOCAL_WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    assert agent.one_host and agent.rendezvous_address == ("10.0.0.1", 29500)  # it listens where torchrun says
    assert read("10.0.0.1", LOCAL_WORLD_SIZE="1").rendezvous_address == ("10.0.0.1", 29500)


# Other launchers


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NNODES": "1"}
STEP = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TASKS = {
    "srun": STEP,
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1",
    },
    "mpiexec (PMI)": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "MVAPICH2": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
    "PALS": {"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
    "Flux": {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"},
}  # fmt: skip
ZERO = {
    name: {k: "0" if k.endswith(("RANK", "ID")) else v for k, v in task.items()}
    for name, task in TASKS.items()
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("tasks", [TASKS, ZERO], ids=["task 1", "task 0"])
def test_tasks_of_another_launcher_do_not_train_alone(
    name: str, tasks: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(FLAGS, tasks[name]) == 2
    text = capsys.readouterr().err
    assert f"{name} started this process as task" in text and "of 2" in text and "torchrun --nnodes" in text
    assert "MASTER_ADDR" in text


@pytest.mark.parametrize("name", TASKS)
def test_tasks_that_know_where_to_meet_are_ranks(name: str) -> None:
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for rank, tasks in ((0, ZERO), (1, TASKS)):
        found = read_launcher({**tasks[name], **met})
        assert (found.rank, found.world_size, found.local_rank, found.port) == (rank, 2, rank, 29500)
        assert found.started_by == name
    assert read_launcher({**TASKS[name], **TWO, "RANK": "0"}).rank == 0  # torchrun under it: its variables count
    with pytest.raises(UserError, match="MASTER_PORT"):
        read_launcher({**TASKS[name], "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(UserError, match=name.split()[0]):
        refuse_copies("hetero-megatron run", "starts all ranks by itself", TASKS[name])


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},  # the shell of salloc
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # srun --pty bash
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {**STEP, "WORLD_SIZE": "1"}, {**STEP, "WORLD_SIZE": "1", "RANK": "0"},  # said by somebody who knows
    ],
)  # fmt: skip
def test_one_task_runs_alone(environment: dict[str, str]) -> None:
    assert read_launcher(environment).world_size == 1
    refuse_copies("hetero-megatron run", "starts all ranks by itself", environment | {"RANK": "0"})


@pytest.mark.parametrize(
    "environment",
    [
        {"PMIX_RANK": "0"}, {"ALPS_APP_PE": "3"}, {"PALS_RANKID": "0"},  # of how many is not known
        {**STEP, "SLURM_STEP_NUM_TASKS": "two"}, {**STEP, "SLURM_LOCALID": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2"}, {**TASKS["Open MPI"], "OMPI_COMM_WORLD_RANK": "x"},
        {**TASKS["srun"], "SLURM_PROCID": "2"},
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_refused_wherever_they_meet(environment: dict[str, str]) -> None:
    for more in ({}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}):
        with pytest.raises(UserError, match="started this process as task"):
            read_launcher({**environment, **more})


def test_a_second_task_shows_that_there_is_a_step() -> None:
    with pytest.raises(UserError, match="srun started this process as task 1 of 2"):
        read_launcher(SLURM)


def test_dry_runs_need_no_launch() -> None:
    assert read_launcher({"WORLD_SIZE": "8"}, joins=False).world_size == 8
    assert read_launcher(TASKS["srun"], joins=False).world_size == 1
    with pytest.raises(UserError, match="RANK"):
        read_launcher({"RANK": "x"}, joins=False)


def test_jobs_across_hosts_without_a_secret_say_so() -> None:
    far = {**TWO, "MASTER_ADDR": "10.0.0.1"}
    assert "HETERO_JOB_SECRET" in open_to_others(read_launcher(far, joins=False))
    for closed in ({**far, "HETERO_JOB_SECRET": "x" * 16}, {**far, "LOCAL_WORLD_SIZE": "2"}, TWO, {}):
        assert open_to_others(read_launcher(closed, joins=False)) == ""
