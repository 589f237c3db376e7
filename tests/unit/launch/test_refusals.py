"""Bad input of launching: one clear message each, and nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.cluster import main as cluster_command
from hetero_megatron.cli.launch import main as launch
from hetero_megatron.cli.run import main as run
from hetero_megatron.cluster import load_cluster
from hetero_megatron.cluster.rates_section import write_rates
from hetero_megatron.errors import UserError
from hetero_megatron.launch.checks import check_facts
from hetero_megatron.launch.connection import Connection
from hetero_megatron.launch.discover import cluster_document
from hetero_megatron.launch.hosts import hosts_of
from hetero_megatron.launch.kubernetes import manifest
from hetero_megatron.launch.slurm import place_of_task

GOOD = """
nodes:
  - {name: a, count: 2, chip: A100-80-SXM, hosts: [n1, n2]}
  - {name: b, chip: H20}
launch: {image: "x:1"}
"""


def refused(error: BaseException, *words: str) -> None:
    text = str(error)
    assert len(text.splitlines()) == 1 and all(word in text for word in words), text


FILES = {
    "fewer hosts than nodes": ("[n1, n2]", "[n1]", ("nodes[0].hosts", "1 for a group of 2", ":3")),
    "two nodes with one address": ("[n1, n2]", "[n1, n1]", ("n1", "address", ":3")),
    "two groups with one address": ("chip: H20", "chip: H20, hosts: [n2]", ("n2", "a has this address", ":4")),
    "two hosts with one name": ("name: b", "name: a", ("two node groups have this name", ":4")),
    "no address": ("[n1, n2]", "[n1, 'a b']", ("a b", "name or address of a host")),
    "a shell in an address": ("[n1, n2]", "[n1, '$(reboot)']", ("name or address of a host",)),
    "an option as an address": ("[n1, n2]", "[n1, -oProxyCommand=x]", ("name or address of a host",)),
    "hosts as a word": ("[n1, n2]", "n1", ("a list was expected", "hosts")),
    "no interface": ("chip: H20", "chip: H20, interface: 'a/b'", ("interface", "eth0")),
    "a variable with a blank": ("chip: H20", "chip: H20, env: {'A B': 1}", ("'A B'", "name of a variable")),
    "a variable that launching sets": ("chip: H20", "chip: H20, env: {RANK: 3}", ("RANK", "set by the launcher")),
    "true as a variable": ("chip: H20", "chip: H20, env: {A: true}", ("in quotes",)),
    "an unknown key of a group": ("chip: H20", "chip: H20, intreface: eth0", ("interface", "did you mean")),
    "an unknown key of launch": ("image", "imagee", ("did you mean", "image")),
    "a port that is none": ('image: "x:1"', "port: 70000", ("launch.port", "65535")),
    "a master port of 0": ('image: "x:1"', "master_port: 0", ("master_port",)),
    "an unknown chip": ("chip: H20", "chip: H2O", ("H2O", "unknown chip")),
    "missing name": ("name: b, ", "", ("'name' is missing", ":4")),
}


@pytest.mark.parametrize("case", FILES, ids=str)
def test_cluster_files(case: str, tmp_path: Path) -> None:
    old, new, words = FILES[case]
    assert old in GOOD
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError) as found:
        hosts_of(load_cluster(path))
    refused(found.value, *words, str(path))


HOST_FILES = {
    "a host twice": ("n1 slots=8 type=H20\nn1 slots=8 type=H20\n", ("two hosts have this name", "n1", ":2")),
    "no type": ("n1 slots=8\n", ("type= is missing", ":1")),
    "no slots": ("n1 type=H20\n", ("slots= is missing", ":1")),
    "slots of 0": ("n1 slots=0 type=H20\n", ("number of chips", "0")),
    "slots as a word": ("n1 slots=all type=H20\n", ("number of chips", "all")),
    "an unknown type": ("n1 slots=8 type=H2O\n", ("unknown chip", "H2O")),
    "an unknown key": ("n1 slots=8 type=H20 rack=4\n", ("unknown key of a host file", "rack")),
    "a line without keys": ("n1 slots=8 type=H20\nn2\n", ("slots= is missing", ":2")),
}


@pytest.mark.parametrize("case", HOST_FILES, ids=str)
def test_host_files(case: str, tmp_path: Path) -> None:
    text, words = HOST_FILES[case]
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError) as found:
        load_cluster(path)
    refused(found.value, *words)


def test_rates_are_not_written_into_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("n1 slots=8 type=H20\n")
    with pytest.raises(UserError) as found:
        write_rates(path, {}, path)
    refused(found.value, "--out", "host file")
    assert path.read_text() == "n1 slots=8 type=H20\n"
    write_rates(path, {"chips": {}}, tmp_path / "cluster.yaml")
    assert load_cluster(tmp_path / "cluster.yaml").world_size == 8


def facts(**changed: Any) -> dict[str, Any]:
    usual = {"version": "1.0", "torch": "2.13", "python": "3.11.7", "interfaces": ["lo", "eth0"], "hostname": "h"}
    return usual | changed


FACTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "versions of ours": (facts(identity="1"), facts(identity="2", version="1.1"), ("1.0 on a-0", "1.1 on a-1")),
    "versions of torch": (facts(identity="1"), facts(identity="2", torch="2.11"), ("torch", "2.11 on a-1")),
    "versions of Python": (facts(identity="1"), facts(identity="2", python="3.12.1"), ("Python", "3.12 on a-1")),
    "no torch": (facts(identity="1", torch=""), facts(identity="2", torch=""), ("torch", "not installed")),
    "one host twice": (facts(identity="1"), facts(identity="1"), ("a-1", "the same host as a-0")),
    "no such interface": (facts(identity="1"), facts(identity="2", interfaces=["lo", "ens3"]), ("eth0", "ens3", "a-1")),
}


class Known(Connection):
    """Of a host, without a process."""

    def __init__(self, host: Any) -> None:
        self.host = host


@pytest.mark.parametrize("case", FACTS, ids=str)
def test_what_hosts_say(case: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{name: a, count: 2, chip: H20, interface: eth0}]\n")
    cluster = load_cluster(path)
    one, other, words = FACTS[case]
    connections = [Known(host) for host in hosts_of(cluster)]
    with pytest.raises(UserError) as found:
        check_facts({"a-0": one, "a-1": other}, connections, cluster)
    refused(found.value, *words)
    check_facts({"a-0": facts(identity="1"), "a-1": facts(identity="2", python="3.11.2")}, connections, cluster)
    vendors = [facts(identity=str(i), torch=f"2.11.0+{build}") for i, build in enumerate(("cu130", "rocm7.1"))]
    check_facts(dict(zip(("a-0", "a-1"), vendors, strict=True)), connections, cluster)  # after + stands the vendor


def test_chips_of_unlike_vendors_may_need_other_releases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{name: a, count: 2, chip: H20}, {name: b, count: 2, chip: MI300X}]\n")
    cluster = load_cluster(path)
    connections = [Known(host) for host in hosts_of(cluster)]

    def check(**torch: str) -> None:
        said = {node: facts(identity=node, torch=torch[node[0] + node[2]]) for node in ("a-0", "a-1", "b-0", "b-1")}
        check_facts(said, connections, cluster)

    check(a0="2.13.0+cu130", a1="2.13.0+cu130", b0="2.11.0+rocm7.1", b1="2.11.0+rocm7.1")
    assert "notice: launcher: torch: 2.13.0 on a-0, a-1; 2.11.0 on b-0, b-1" in capsys.readouterr().out
    for versions in (
        {"a0": "2.13.0", "a1": "2.12.0", "b0": "2.11.0", "b1": "2.11.0"},
        {"a0": "2.13.0", "a1": "2.11.0", "b0": "2.11.0", "b1": "2.11.0"},
    ):
        with pytest.raises(UserError) as found:
            check(**versions)
        refused(found.value, "torch", "2.13.0 on a-0", "chips of one vendor")
    with pytest.raises(UserError, match="Hetero-Megatron"):
        check_facts({c.host.node: facts(version=c.host.group) for c in connections}, connections, cluster)


COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no command": (["launch", "--cluster", "GOOD"], ("-- COMMAND", "missing")),
    "no cluster": (["launch", "--", "x.py"], ("--cluster",)),
    "a cluster file that is not there": (["launch", "--cluster", "none.yaml", "--", "x.py"], ("none.yaml",)),
    "an unknown way": (["launch", "--cluster", "GOOD", "--via", "mpi", "--", "x.py"], ("--via", "mpi", "slurm")),
    "an unknown flag": (["launch", "--cluster", "GOOD", "--user", "me", "--", "x.py"], ("--user",)),
    "no seconds": (["launch", "--cluster", "GOOD", "--grace", "0", "--", "x.py"], ("--grace", "above 0")),
    "a lease of nan": (["launch", "--cluster", "GOOD", "--lease", "nan", "--", "x.py"], ("--lease",)),
    "restarts": (["launch", "--cluster", "GOOD", "--max-restarts", "-1", "--", "x.py"], ("--max-restarts",)),
    "submit without slurm": (["launch", "--cluster", "GOOD", "--submit", "--", "x.py"], ("--submit", "slurm")),
    "out of ssh": (["launch", "--cluster", "GOOD", "--out", "x", "--", "x.py"], ("--out", "print")),
    "no ssh command": (["launch", "--cluster", "GOOD", "--ssh-command", " ", "--", "x"], ("ssh-command",)),
    "a name that Kubernetes has not": (
        ["launch", "--cluster", "GOOD", "--via", "kubernetes", "--job-name", "My_Job", "--", "x"], ("My_Job", "letters")
    ),
    "two kinds of workers": (
        ["launch", "--cluster", "GOOD", "--via", "kubernetes", "--kind", "pytorchjob", "--", "x.py"], ("jobset",)
    ),
    "no image": (["launch", "--cluster", "BARE", "--via", "kubernetes", "--", "x.py"], ("launch.image", "missing")),
    "srun outside a step": (["launch", "--cluster", "GOOD", "--via", "srun", "--", "x.py"], ("SLURM_STEP_NODELIST",)),
    "no sbatch": (["launch", "--cluster", "GOOD", "--via", "slurm", "--submit", "--", "x.py"], ("sbatch",)),
    "no hosts to ask": (["cluster", "discover"], ("HOST", "missing")),
    "a host to ask twice": (["cluster", "discover", "n1", "n1"], ("n1", "twice")),
    "an existing file": (["cluster", "discover", "n1", "--out", "GOOD"], ("--out", "there already")),
    "a host that is not to be asked": (
        ["cluster", "discover", "n1", "--ssh-command", "false"], ("n1", "cannot be asked", "exit code 1")
    ),
    "another word": (["cluster", "find"], ("find", "discover")),
    "run via slurm": (["run", "--via", "slurm", "--cluster", "GOOD", "--plan", "x", "--", "y"], ("--via", "launch")),
    "run via ssh without a cluster": (["run", "--via", "ssh", "--plan", "x", "--", "y"], ("--via", "--cluster")),
    "a lease without ssh": (["run", "--lease", "3", "--plan", "x", "--", "y"], ("--lease", "--via ssh")),
    "a testbed over ssh": (
        ["run", "--via", "ssh", "--testbed", "--cluster", "GOOD", "--plan", "x", "--", "y"], ("--testbed", "--via")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS, ids=str)
def test_command_lines(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path) if case == "no sbatch" else "/usr/bin:/bin")
    argv, words = COMMANDS[case]
    (tmp_path / "GOOD").write_text(GOOD)
    (tmp_path / "BARE").write_text(GOOD.replace('launch: {image: "x:1"}\n', ""))
    argv = [str(tmp_path / word) if word in ("GOOD", "BARE") else word for word in argv]
    command = {"launch": launch, "cluster": cluster_command, "run": run}[argv[0]]
    with pytest.raises(UserError) as found:
        command(argv[1:])
    refused(found.value, *words)


def step(nodes: str, node: str, tasks: int) -> dict[str, str]:
    return {"SLURM_STEP_NODELIST": nodes, "SLURM_NODEID": node, "SLURM_STEP_NUM_TASKS": str(tasks)}


STEPS: dict[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "too few tasks": (step("n1,n2", "0", 2), ("3 nodes", "2")),
    "two tasks per node": (step("n[1-2],b", "0", 6), ("6",)),
    "a stranger among nodes": (step("n1,n2,x", "0", 3), ("= x", "no such node")),
    "no number of a node": (step("n1,n2,b", "x", 3), ("NODEID",)),
    "a list that is none": (step("n[1-", "0", 3), ("NODELIST",)),
}


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_of_slurm(case: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD)
    with pytest.raises(UserError) as found:
        place_of_task(load_cluster(path), STEPS[case][0])
    refused(found.value, *STEPS[case][1])


def answer(**changed: Any) -> dict[str, Any]:
    usual = {"hostname": "h", "accelerator": "x", "cores": 8, "memory": 1e11, "interfaces": ["lo", "eth0"]}
    return {**usual, "chips": [{"name": "NVIDIA H200", "memory": 1.5e11}] * 2, **changed}


def test_hosts_that_cannot_be_written_down() -> None:
    two = [{"name": "NVIDIA H200", "memory": 1.5e11}, {"name": "NVIDIA L4", "memory": 2.3e10}]
    with pytest.raises(UserError) as found:
        cluster_document({"n1": answer(chips=two)})
    refused(found.value, "n1", "not alike", "L4")
    with pytest.raises(UserError) as found:
        cluster_document({"n1": answer(chips="many")})
    refused(found.value, "n1", "chips")


def test_names_of_pods_that_a_job_set_is_not_admitted_with(tmp_path: Path) -> None:
    """63 characters with the replicated job, its index, the pod's index and the five letters that Kubernetes adds."""
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace("name: b", f"name: {'b' * 40}"))
    manifest(load_cluster(path), ["x.py"], "jobset", "j" * 12)
    with pytest.raises(UserError) as error:
        manifest(load_cluster(path), ["x.py"], "jobset", "j" * 13)
    refused(error.value, "--job-name", "63 characters", "shorter by 1")
