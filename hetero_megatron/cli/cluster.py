"""``hetero-megatron cluster discover``: write a cluster file by asking hosts what they have."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.cli.arguments import ArgumentParser, seconds
from hetero_megatron.cli.output import check_writable, write_text
from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.cluster_file import cluster_from_dict
from hetero_megatron.cluster.hosts import LAUNCH_WORDS, LaunchSettings
from hetero_megatron.cluster.units import HOST
from hetero_megatron.errors import UserError, printable
from hetero_megatron.launch.connection import SSH, remote_line, ssh_words
from hetero_megatron.launch.discover import cluster_document
from hetero_megatron.launch.facts import MARK
from hetero_megatron.launch.hosts import Host
from hetero_megatron.utils.files import parse_json, read_text
from hetero_megatron.utils.text import notice_line, plural
from hetero_megatron.utils.yaml_document import QuotingDumper


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser("cluster discover", "Ask hosts what they have, and write a cluster file for them.")
    p.add_argument("hosts", nargs="*", metavar="HOST", help="names or addresses, in the order of the ranks")
    p.add_argument("--hostfile", metavar="FILE", help="one host a line; more words on a line are not read")
    p.add_argument("--out", metavar="FILE", help="default: standard output")
    p.add_argument("--ssh-command", default=SSH, metavar="WORDS", help="in place of ssh and its options")
    p.add_argument("--user", default="", help="of ssh")
    p.add_argument("--python", default="", help="the interpreter on the hosts (default: this one's path)")
    p.add_argument("--timeout", type=seconds(), default=60.0, help="seconds for all hosts to answer (default 60)")
    return p


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] != "discover":
        if argv and argv[0] in ("-h", "--help"):
            print("usage: hetero-megatron cluster discover HOST ... [--out cluster.yaml]")
            return 0
        raise UserError("no such command", field="cluster", value=argv[0] if argv else "", accepted="discover")
    options = parser().parse_args(list(argv[1:]))
    addresses = _addresses(options)
    if options.out:
        check_writable(options.out, "--out")
        if Path(options.out).exists():
            raise UserError("is there already", field="--out", value=options.out, accepted="a new file")
    for flag in ("user", "python"):
        if value := getattr(options, flag):
            LAUNCH_WORDS[flag].check(value, f"--{flag}")
    launch = LaunchSettings(user=options.user, python=options.python)
    answers = _ask(addresses, Cluster((), {}, launch=launch), options.ssh_command, options.timeout)
    document, notices = cluster_document(answers)
    settings = {name: value for name, value in (("user", options.user), ("python", options.python)) if value}
    if settings:
        document["launch"] = settings
    cluster = cluster_from_dict(document)  # what is written can be read
    text = yaml.dump(document, sort_keys=False, Dumper=QuotingDumper)
    if options.out:
        write_text(options.out, "--out", text)
    else:
        sys.stdout.write(text)
    for notice in notices:
        print(notice_line(notice), file=sys.stderr)
    nodes = sum(group.count for group in cluster.nodes)
    print(f"{plural(nodes, 'host')}, {plural(cluster.world_size, 'chip')}", file=sys.stderr)
    return 0


def _addresses(options: argparse.Namespace) -> list[str]:
    addresses = list(options.hosts)
    if options.hostfile:
        lines = (line.partition("#")[0].split() for line in read_text(options.hostfile, "--hostfile").splitlines())
        addresses += [words[0] for words in lines if words]
    if not addresses:
        raise UserError("missing", field="HOST", accepted="hosts to ask, or --hostfile FILE")
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            raise UserError("is there twice", field="HOST", value=address, accepted="each host once")
        HOST.check(address, "HOST")
    return addresses


def _ask(addresses: Sequence[str], cluster: Cluster, ssh: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Their answers, by address; all are asked at once."""
    python = cluster.launch.python or sys.executable
    line = remote_line(python, "hetero_megatron.launch.facts")
    running = {}
    for index, address in enumerate(addresses):
        host = Host(index, address, address, address, "", 1, index)
        running[address] = subprocess.Popen(
            ssh_words(ssh, host, cluster, line), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    end, answers = time.monotonic() + seconds, {}
    try:
        for address, process in running.items():
            try:
                out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise UserError(f"no answer in {seconds:g} s", field="HOST", value=address,
                                accepted="a host that answers ssh without a password") from None  # fmt: skip
            lines = [text for text in out.split("\n") if text.startswith(MARK)]  # splitlines() would split at MARK, too
            if process.returncode or not lines:
                reason = printable(err.strip().splitlines()[-1]) if err.strip() else f"exit code {process.returncode}"
                raise UserError(f"cannot be asked: {reason}", field="HOST", value=address,
                                accepted="a host that answers ssh without a password, with Hetero-Megatron in "
                                f"{python}")  # fmt: skip
            answers[address] = parse_json(lines[-1].removeprefix(MARK), address)
    finally:
        for process in running.values():
            process.kill()
    return answers


