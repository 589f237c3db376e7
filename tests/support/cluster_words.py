"""Hostile words for every place of a cluster file, and what is looked at to see that nothing came of them.

A word is looked for where it would act: in argv of ssh, in the options that SLURM would read of a script, in what a
shell makes of the lines, and in manifests after Kubernetes' own replacement.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.cluster import Cluster, cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.launch.checks import log_files
from hetero_megatron.launch.connection import remote_line, ssh_words
from hetero_megatron.launch.hosts import hosts_of, printed
from hetero_megatron.launch.kubernetes import literal, manifest
from hetero_megatron.launch.slurm import batch_script

COMMAND = ["hetero-megatron", "pretrain", "--plan", "a plan.yaml", "$(USER) $$ $((1+1))"]
BASE: dict[str, Any] = {
    "version": 1,
    "nodes": [
        {"name": "big", "count": 2, "chip": "own", "chips_per_node": 2, "host_memory": "64 GiB",
         "hosts": ["n1", "n2"], "interface": "eth0", "env": {"MODE": "x y"}, "partition": "a", "gres": "gpu:2",
         "node_selector": {"pool": "a"}, "resource": "x/y",
         "python": "/rocm/bin/python", "directory": "/rocm/job", "image": "e.com/rocm:1"},
        {"name": "small", "count": 1, "chip": "H20"},
    ],
    "chips": {"own": {
        "memory": "80 GiB", "tflops": {"bf16": 300}, "memory_bandwidth": "1 TB/s", "link_bandwidth": "100 GB/s",
        "host_bandwidth": "25 GB/s", "dtypes": ["fp32", "bf16"], "emulate": {"speed": 1, "memory": "1 GiB"},
        "rates": {"bf16": {"x": 1}}, "source": "here", "cost_per_hour": 1, "vendor": "NVIDIA",
        "communicators": {"each": "1 MB", "peer": "1 MB"},
    }},
    "links": {
        "intra_node": {"bandwidth": "1 GB/s"}, "inter_node": {"bandwidth": "1 GB/s", "latency": "1 us"},
        "pairs": [{"between": ["big", "small"], "bandwidth": "1 GB/s", "transport": "direct",
                   "emulate": {"latency": "1 us"}}],
    },
    "rates": {"chips": {"own": {"bf16": {"x": 1}}}, "links": [{"between": ["big", "small"], "alpha": 1}]},
    "launch": {
        "user": "me", "port": 22, "python": "/opt/bin/python", "directory": "/shared", "master_port": 29511,
        "env": {"ALL": "1"}, "image": "e.com/hm:1", "namespace": "ns", "account": "lab", "time": "2:00:00",
        "shm": "1 GiB", "volumes": [{"path": "/data", "claim": "data"}, {"path": "/b", "host": "/b"},
                                    {"path": "/c", "nfs": "server:/c", "read_only": True}],
    },
}  # fmt: skip
HOSTILE = (
    "-oProxyCommand=touch OWNED", "--output=OWNED", "x --output=OWNED", "x\n#SBATCH --output=OWNED", "../OWNED",
    "/tmp/OWNED", "a/../../OWNED", "$(touch OWNED)", "`touch OWNED`", "x; touch OWNED", "x && touch OWNED", "$HOME",
    "${HOME}", "$(HOME)", "$$(HOME)", "$$", "$((1+1))", "x'; touch OWNED; '", 'x"; touch OWNED; "', "x | touch OWNED",
    "x > OWNED", "x\ttouch", "x\0y", "\x1b[31m", "x\r", "x\u2028y", "~", "~root/x", "-", "--", ".", "..", "", " ",
    "a,b", "a b", "a@b", "a%b", "%x", "*", "?", "[x]", "!x", "#x", "x#", "&x", "\\", "\\n", "é", "\u202ex", "x" * 300,
    "@evil", "x:@evil", "{{.}}", "1", "0x1",
)  # fmt: skip

def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value, and of every key (which ends in None)."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict):
                yield (*path, key, None)
            yield from places(item, (*path, key))
    else:
        yield path


def changed(value: Any, path: tuple[Any, ...], word: str) -> Any:
    head, *rest = path
    if rest == [None]:
        return {(word if key == head else key): item for key, item in value.items()}
    new = changed(value[head], tuple(rest), word) if rest else word
    copy = value.copy()
    copy[head] = new
    return copy


def expanded(text: str, environment: dict[str, str]) -> str:
    """As Kubernetes documents it (Container.command): $$ is $, $(NAME) a variable's value if there is one."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else environment.get(found[1] or "", found[0]),
        text,
    )


def check_ssh(cluster: Cluster) -> None:
    for host in hosts_of(cluster):
        argv = ssh_words("ssh -o BatchMode=yes", host, cluster, remote_line(host.python))
        end = argv.index("--")
        assert argv[:end] in (["ssh", "-o", "BatchMode=yes"], ["ssh", "-o", "BatchMode=yes", "-p", argv[end - 1]])
        assert len(argv) == end + 3 and not argv[end + 1].startswith("-")
        assert not re.search(r"[\s'\"`$\\;&<>|(){}]", argv[end + 1]), argv
        line = shlex.split(argv[-1])
        assert line[0] == "exec" and line[2:] == ["-m", "hetero_megatron.launch.remote"] and line[1][0] != "-"


def check_slurm(cluster: Cluster) -> None:
    script = batch_script(cluster, COMMAND, "job", ["-m", "launch"])
    options = [line.split() for line in script.splitlines() if line.startswith("#SBATCH")]
    names = {"job-name", "requeue", "open-mode", "signal", "account", "time", "partition", "nodes", "ntasks-per-node",
             "gres", "exclusive", "nodelist"}  # fmt: skip
    for words in options:
        assert len(words) == 2, words
        assert words[1] == "hetjob" or words[1].partition("=")[0].removeprefix("--") in names, words
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    assert lines[0] == "set -e" and shlex.split(lines[1])[:2] == ["cd", "--"] and len(lines) == 4
    task = shlex.split(lines[3])
    assert task[:2] == ["exec", "srun"] and task[-len(COMMAND) :] == COMMAND


def check_shells(cluster: Cluster, folder: Path) -> None:
    for line in printed(cluster, COMMAND).splitlines():
        if not line.startswith("#"):
            assert shlex.split(line)[-len(COMMAND) :] == COMMAND
    environment = {"USER": "somebody", "HOME": "/root", "HETERO_NODE": "taken"}
    for document in yaml.safe_load_all(manifest(cluster, COMMAND, "jobset", "train")):
        for job in document["spec"]["replicatedJobs"] if document["kind"] == "JobSet" else ():
            container = job["template"]["spec"]["template"]["spec"]["containers"][0]
            script = expanded(container["command"][-1], environment)
            assert literal(script) == container["command"][-1]
            python = next(part for part in script.partition("; exec ")[2:])
            stand_in = script.replace(f"exec {python}", f"set -- {python}; printf '%s\\0' \"$@\"")
            done = subprocess.run(["sh", "-c", stand_in], cwd=folder, capture_output=True, text=True,
                                  env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": "0"})  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert done.stdout.split("\0")[-len(COMMAND) - 1 : -1] == COMMAND
            wanted = {**cluster.launch.env}
            for group in cluster.nodes:
                wanted |= group.settings.env
            for variable in container["env"]:
                if variable["name"] in wanted:
                    value = expanded(variable["value"], environment)
                    assert value in {*cluster.launch.env.values(), *(v for g in cluster.nodes for v in
                                     g.settings.env.values())}  # fmt: skip


def check_word(place: tuple[Any, ...], word: str, folder: Path, shells: bool = True) -> None:
    """With ``shells``, as a file, and what is written is given to shells."""
    file, data = folder / "cluster.yaml", changed(BASE, place, word)
    try:
        if shells:
            file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        cluster = load_cluster(file) if shells else cluster_from_dict(data)
        hosts_of(cluster)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        return
    check_cluster(cluster, folder, shells)


def check(file: Path) -> None:
    """A cluster file that is accepted."""
    check_cluster(load_cluster(file), file.parent, True)


def check_cluster(cluster: Cluster, folder: Path, shells: bool) -> None:
    check_ssh(cluster)
    check_slurm(cluster)
    if shells:
        with suppress(UserError):  # a name that Kubernetes does not take
            check_shells(cluster, folder)
        assert not list(folder.rglob("OWNED*")) and not Path("/tmp/OWNED").exists()
    logs = folder / "logs"
    for path in log_files(str(logs), [host.node for host in hosts_of(cluster)]).values():
        assert path.resolve().parent == logs.resolve() and not path.name.startswith(("-", "."))
