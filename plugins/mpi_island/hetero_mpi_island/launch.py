"""Start a rank of a job whose ranks are in several MPI worlds; one ``mpiexec`` per island runs it.

    mpiexec -disable-auto-cleanup -n 2 python -m hetero_mpi_island.launch --base-rank 0 --world-size 4 \\
        --master-addr 10.0.0.1 --master-port 29500 -- pretrain_gpt.py --platform mpi_host ...
    mpiexec -disable-auto-cleanup -n 2 python -m hetero_mpi_island.launch --base-rank 2 --world-size 4 ...

It sets RANK (--base-rank plus the rank in this MPI world), WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and
runs ``python`` with the words after ``--``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hetero_megatron.environment.foreign_launcher import find_task
from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.errors import UserError

SET_HERE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hetero_mpi_island.launch", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base-rank", type=int, required=True, help="rank of the first process of this MPI world")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job, of all islands")
    parser.add_argument("--master-addr", help="host of rank 0; default: MASTER_ADDR")
    parser.add_argument("--master-port", type=int, help="a free port there; default: MASTER_PORT")
    parser.add_argument("command", nargs="+", help="-- and what Python runs: a script, or -m and a module, with flags")
    return parser.parse_args(words)


def variables(given: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process as a rank.

    Raises:
        UserError: the numbers do not fit each other, an address is missing, or another launcher has set a rank.
    """
    for name in SET_HERE:
        if name in environment:
            raise UserError("is set already, by another launcher", field=name, value=environment[name],
                            accepted="not set: this sets it", where="environment")  # fmt: skip
    task = find_task(environment)  # None: one process
    rank, size, local = (0, 1, 0) if task is None else (task.rank, task.size, task.local_rank or 0)
    if rank is None or size is None:
        raise UserError("the launcher does not say rank and size of this MPI world", field="--base-rank",
                        value=given.base_rank, accepted="mpiexec of MPICH or Open MPI")  # fmt: skip
    if not 0 <= given.base_rank <= given.world_size - size:
        raise UserError(
            f"the {size} ranks of this island do not fit into --world-size {given.world_size}", field="--base-rank",
            value=given.base_rank, accepted=f"0 to --world-size - {size}",
        )  # fmt: skip
    made = {**environment, "RANK": str(given.base_rank + rank), "WORLD_SIZE": str(given.world_size)}
    made["LOCAL_RANK"] = str(local)
    if given.master_addr is not None:
        made["MASTER_ADDR"] = given.master_addr
    if given.master_port is not None:
        made["MASTER_PORT"] = str(given.master_port)
    read_launcher(made)  # says what is missing or wrong
    return made


def main(words: Sequence[str]) -> int:
    """The exit code of the rank; 2: the request is refused."""
    try:
        given = parse(words)
        made = variables(given, os.environ)
    except UserError as error:
        task = find_task(os.environ)
        if task is None or not task.rank:  # the others have the same to say
            print(f"error: {error}", file=sys.stderr)
        return 2
    return supervise([sys.executable, *given.command], made)


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a rank as a child; its exit code, or 128 and the number of the signal that ended it.

    Not by ``exec``: when a process of its own is ended by a signal, mpiexec of MPICH kills all others of the island,
    ``-disable-auto-cleanup`` or not, before they can say which rank is missing.
    """
    # mpiexec sends it to all others when a rank dies, which would end them before they say who is missing.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    rank = subprocess.Popen(command, env=environment, close_fds=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # mpiexec sends them to the rank too
        signal.signal(number, signal.SIG_IGN)
    if connection := environment.get("PMI_FD", ""):
        os.close(int(connection))
    code = rank.wait()
    return code if code >= 0 else 128 - code  # as a shell says it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
