"""Launchers that start processes without torchrun's variables: how their environments tell that there are several.

Each sets, for every task, its number and how many there are. Batch scripts and interactive shells of an allocation hold
some of the same variables and are one process: SLURM_NTASKS, for one, says what was allocated, not what was started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

_TORCHRUN = "torchrun --nnodes N --nproc-per-node M --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id JOB ..."


@dataclass(frozen=True)
class Task:
    """One of several tasks. ``signs``: the variables that say so; None: a number that they do not say.

    ``address``, ``port``: where the tasks can meet, and ``node``: this one's host, if the launcher says so; else empty
    and 0.
    """

    launcher: str
    advice: str
    signs: tuple[str, ...]
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    address: str = ""
    port: int = 0
    node: str = ""

    @property
    def complete(self) -> bool:
        """Whether it could be a rank of a job."""
        if self.rank is None or self.size is None or self.local_rank is None:
            return False
        return self.rank < self.size and self.local_rank < (self.local_size or self.size) <= self.size


@dataclass(frozen=True)
class _Names:
    """Variables of a launcher, in order of preference."""

    launcher: str
    advice: str
    rank: tuple[str, ...]
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


def _per_node(command: str) -> str:
    return f"one torchrun per node: {command} {_TORCHRUN}"


# The inner ones first: mpirun starts its daemons with srun, and what counts is what those start.
_MPI = _per_node("mpirun --map-by ppr:1:node")
_LAUNCHERS = (
    _Names(
        "Open MPI", _MPI, ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "MVAPICH2", _per_node("mpirun -ppn 1"), ("MV2_COMM_WORLD_RANK",), ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Names(
        "jsrun", _per_node("jsrun --tasks_per_rs 1"), ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",), ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    _Names(
        "Flux", _per_node("flux run --tasks-per-node=1"), ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_LOCAL_ID",),
    ),
    _Names(
        "PALS", _per_node("mpiexec --ppn 1"), ("PALS_RANKID",), ("PALS_SIZE", "PMI_SIZE"), ("PALS_LOCAL_RANKID",),
        ("PALS_LOCAL_SIZE",),
    ),
    _Names("aprun", _per_node("aprun -N 1"), ("ALPS_APP_PE",)),
    _Names(
        "mpiexec (PMI)", _per_node("mpiexec -ppn 1"), ("PMI_RANK", "PMI_ID"), ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Names(
        "srun", _per_node("srun --ntasks-per-node=1"), ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",),
    ),
    _Names("a PMIx launcher", _MPI, ("PMIX_RANK",)),
)  # fmt: skip


def find_task(environment: Mapping[str, str]) -> Task | None:
    """The task of a launcher that started several (or does not say how many); None: this process is alone."""
    tasks = list(_tasks(environment))
    full = [task for task in tasks if task.complete]  # with srun --mpi=pmi2, PMI's variables are a part of the truth
    sure = [task for task in tasks if task.size is not None]  # PMIx alone does not say
    chosen = next(iter(full or sure or tasks), None)
    return None if chosen is None or chosen.size == 1 else chosen


def _tasks(environment: Mapping[str, str]) -> Iterator[Task]:
    for names in _LAUNCHERS:
        if names.launcher == "srun" and not _in_step(environment):
            continue
        groups = (names.rank, names.size, names.local_rank, names.local_size)
        values = [_first(environment, group) for group in groups]
        signs = tuple(name for name, _ in values[:2] if name)
        if signs:
            rank, size, local_rank, local_size = (number for _, number in values)
            task = Task(names.launcher, names.advice, signs, rank, size, local_rank, local_size)
            if names.launcher == "srun":
                from hetero_megatron.environment.slurm_names import rendezvous_address

                address, port = rendezvous_address(environment)
                task = replace(task, address=address, port=port, node=environment.get("SLURMD_NODENAME", ""))
            yield task


def _in_step(environment: Mapping[str, str]) -> bool:
    """srun started this process; the script of a batch job and the shell of an allocation are in no step."""
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")
    return any(name in environment for name in steps) or environment.get("SLURM_PROCID", "0") != "0"


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int | None]:
    """(name, number) of the first of ``names`` that is set; what is no number is None."""
    for name in names:
        if name in environment:
            text = environment[name].strip()
            return name, int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
    return "", None
