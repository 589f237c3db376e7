"""``hetero-megatron launch``: start a command on all hosts of a cluster file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hetero_megatron.cli.arguments import ArgumentParser, count, seconds
from hetero_megatron.cli.output import check_writable, write_text
from hetero_megatron.cluster import load_cluster
from hetero_megatron.environment.foreign_launcher import find_task
from hetero_megatron.errors import UserError
from hetero_megatron.launch.connection import LEASE, SSH

_LAUNCH = ("-m", "hetero_megatron", "launch")
WAYS = ("ssh", "slurm", "kubernetes", "print", "srun")


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser("launch", "Start a command on all hosts of a cluster file: one rank per chip, in file order.")
    p.usage = "hetero-megatron launch --cluster FILE [--via WAY] [flags] -- COMMAND ..."
    p.add_argument("--cluster", required=True, help="cluster file, or a host file with lines HOST slots=N type=CHIP")
    p.add_argument("--via", choices=WAYS, help="ssh (default): one torchrun per host; print: the lines to run by hand; "
                   "slurm: submit a heterogeneous job; kubernetes: a manifest; srun (default inside an srun step): "
                   "this process is the task of one host")  # fmt: skip
    p.add_argument("--max-restarts", type=count(0), default=0, help="of torchrun: all ranks again after a failure")
    p.add_argument("--out", metavar="FILE", help="print, slurm, kubernetes: write it there instead")
    ssh = p.add_argument_group("ssh")
    ssh.add_argument("--ssh-command", default=SSH, metavar="WORDS", help="e.g. with other options; it is given the "
                     "host and a shell line")  # fmt: skip
    ssh.add_argument("--grace", type=seconds(), default=30.0,
        help="seconds that the other hosts have to end (default 30)")  # fmt: skip
    ssh.add_argument("--connect-timeout", type=seconds(), default=30.0,
        help="seconds for all hosts to answer (default 30)")  # fmt: skip
    ssh.add_argument("--lease", type=seconds(), default=LEASE,
        help="seconds without a word after which a host, or this "
                     "launcher, counts as lost (default 30)")  # fmt: skip
    ssh.add_argument("--log-dir", help="write each host's output to DIR/NODE.log, too")
    slurm = p.add_argument_group("slurm")
    slurm.add_argument("--submit", action="store_true", help="run sbatch on the script instead of printing it")
    slurm.add_argument("--job-name", default="hetero-megatron", help="slurm, kubernetes (default hetero-megatron)")
    kubernetes = p.add_argument_group("kubernetes")
    kubernetes.add_argument("--kind", choices=("jobset", "pytorchjob"), default="jobset")
    return p


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:split])
    command = words[split + 1 :]
    if not command:
        raise UserError("missing", field="-- COMMAND", accepted="e.g. -- pretrain_gpt.py --plan plan.yaml ...")
    _check(options)
    cluster = load_cluster(options.cluster)
    task = find_task(os.environ)
    via = options.via or ("srun" if task is not None and task.launcher == "srun" else "ssh")
    if via == "ssh":
        from hetero_megatron.launch.over_ssh import SshLaunch

        return SshLaunch(
            cluster, command, options.ssh_command, options.max_restarts, options.grace, options.log_dir,
            options.connect_timeout, options.lease,
        ).run()  # fmt: skip
    if via == "srun":
        from hetero_megatron.launch.slurm import run_task

        return run_task(cluster, command, options.max_restarts)
    if via == "print":
        from hetero_megatron.launch.hosts import printed

        return _write(printed(cluster, command, options.max_restarts), options.out)
    if via == "slurm":
        from hetero_megatron.launch.slurm import batch_script, submit

        script = batch_script(cluster, command, options.job_name, _LAUNCH, options.max_restarts)
        return submit(script, options.out) if options.submit else _write(script, options.out)
    from hetero_megatron.launch.kubernetes import manifest

    return _write(manifest(cluster, command, options.kind, options.job_name, options.max_restarts), options.out)


def _check(options: argparse.Namespace) -> None:
    if options.submit and options.via != "slurm":
        raise UserError("it is of --via slurm", field="--submit", accepted="--via slurm --submit")
    if options.out is not None and options.via not in ("print", "slurm", "kubernetes"):
        raise UserError("nothing would be written", field="--out", value=options.out,
                        accepted="--via print, slurm or kubernetes")  # fmt: skip
    if not options.ssh_command.strip():
        raise UserError("is empty", field="--ssh-command", value="", accepted=SSH)


def _write(text: str, out: str | None) -> int:
    if out is None:
        sys.stdout.write(text)
    else:
        check_writable(out, "--out")
        write_text(out, "--out", text)
        print(f"written to {out}", file=sys.stderr)
    return 0
