"""What launchers write, without starting anything: torchrun lines, SLURM scripts, Kubernetes manifests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.cluster.dump import document
from hetero_megatron.cluster.edit import without_nodes
from hetero_megatron.cluster.subset import without
from hetero_megatron.errors import UserError
from hetero_megatron.launch.connection import remote_line
from hetero_megatron.launch.hosts import hosts_of, printed
from hetero_megatron.launch.kubernetes import manifest
from hetero_megatron.launch.slurm import batch_script, place_of_task
from tests.support.paths import ROOT

CLUSTER = """
version: 1
nodes:
  - {name: big, count: 2, chip: A100-80-SXM, chips_per_node: 8, hosts: [n1, n2], interface: eth0, partition: a,
     gres: "gpu:a100:8", node_selector: {pool: a}, resource: example.com/gpu}
  - {name: small, count: 3, chip: MI300X, chips_per_node: 4, partition: b, env: {MODE: "x y"}}
links: {inter_node: {bandwidth: 1 GB/s}}
launch: {python: /opt/venv/bin/python, directory: /shared, master_port: 29511, env: {ALL: 1}, image: "e.com/hm:1",
         user: me, account: lab, time: "2:00:00", shm: 8 GiB,
         volumes: [{path: /data, claim: corpus, read_only: true}, {path: /shared, nfs: "10.0.0.9:/export"}]}
"""
COMMAND = ["hetero-megatron", "pretrain", "--plan", "a plan.yaml"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def test_hosts_keep_the_ranks_of_the_cluster(file: Path) -> None:
    cluster = load_cluster(file)
    ranks = [(host.node, local) for host in hosts_of(cluster) for local in range(host.chips)]
    assert ranks == [(rank.node, rank.local) for rank in cluster.ranks]
    assert [host.address for host in hosts_of(cluster)] == ["n1", "n2", "small-0", "small-1", "small-2"]


def test_a_shell_reads_the_printed_lines(file: Path) -> None:
    lines = [line for line in printed(load_cluster(file), COMMAND).splitlines() if not line.startswith("#")]
    assert len(lines) == 5
    for index, line in enumerate(lines):
        words = shlex.split(line)
        assert words[:4] == ["cd", "--", "/shared", "&&"]
        words = words[4:]
        environment = dict(word.split("=", 1) for word in words[: words.index("/opt/venv/bin/python")])
        assert environment["HETERO_NODE"] == ("big-0", "big-1", "small-0", "small-1", "small-2")[index]
        assert environment["ALL"] == "1" and environment.get("MODE") == (None if index < 2 else "x y")
        assert ("GLOO_SOCKET_IFNAME" in environment) == (index < 2)
        assert words[words.index("--node-rank") + 1] == str(index)
        assert words[words.index("--nproc-per-node") + 1] == ("8" if index < 2 else "4")
        assert words[words.index("--master-addr") + 1] == "n1" and words[-4:] == COMMAND


def test_host_settings_survive_what_changes_clusters(file: Path) -> None:
    cluster = load_cluster(file)
    again = file.with_name("again.yaml")
    again.write_text(yaml.safe_dump(document(cluster)))
    assert document(load_cluster(again)) == document(cluster)
    assert hosts_of(load_cluster(again)) == hosts_of(cluster)
    left = without(cluster, ["big-0"])
    assert [host.address for host in hosts_of(left)] == ["n2", "small-0", "small-1", "small-2"]
    again.write_text(yaml.safe_dump(without_nodes(yaml.safe_load(CLUSTER), {"big-0", "small-1"})))
    assert [host.address for host in hosts_of(load_cluster(again))] == ["n2", "small-0", "small-2"]
    assert [host.node for host in hosts_of(load_cluster(again))] == ["big-1", "small-0", "small-2"]


def test_a_host_file_is_the_cluster_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    big = "10.0.0.1 slots=8 type=A100-80-SXM\n10.0.0.2 slots=8 type=A100-80-SXM\n"
    path.write_text(f"# all hosts\n{big}\nn3 type=H20 slots=4 # one\n")
    cluster = load_cluster(path)
    found = [(host.address, host.chip, host.chips) for host in hosts_of(cluster)]
    assert found == [("10.0.0.1", "A100-80-SXM", 8), ("10.0.0.2", "A100-80-SXM", 8), ("n3", "H20", 4)]
    assert cluster.world_size == 20


OWN = """
version: 1
nodes:
  - {name: cuda, count: 1, chip: A100-80-SXM, chips_per_node: 8, hosts: [n1]}
  - {name: rocm, count: 2, chip: MI300X, chips_per_node: 8, hosts: [n2, n3], python: /rocm env/bin/python,
     directory: /rocm/job, image: "e.com/rocm:1", env: {HSA_XNACK: 0}}
links: {inter_node: {bandwidth: 1 GB/s}}
launch: {python: /cuda/bin/python, directory: /shared, image: "e.com/cuda:1"}
"""
PYTHONS = ["/cuda/bin/python", "/rocm env/bin/python", "/rocm env/bin/python"]
DIRECTORIES = ["/shared", "/rocm/job", "/rocm/job"]


def test_node_groups_may_have_their_own_python_directory_and_image(tmp_path: Path) -> None:
    """Builds of one framework for two vendors are two environments."""
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    cluster = load_cluster(path)
    assert [host.python for host in hosts_of(cluster)] == PYTHONS
    lines = [shlex.split(line) for line in printed(cluster, COMMAND).splitlines() if not line.startswith("#")]
    for words, python, directory in zip(lines, PYTHONS, DIRECTORIES, strict=True):
        assert words[:4] == ["cd", "--", directory, "&&"] and python in words
    for host, python in zip(hosts_of(cluster), PYTHONS, strict=True):
        assert shlex.split(remote_line(host.python))[:2] == ["exec", python]
    script = batch_script(cluster, COMMAND, "job", ["-m", "launch"])
    srun = shlex.split(script.splitlines()[-1])[2:]
    first, second = srun[: srun.index(":")], srun[srun.index(":") + 1 :]
    assert first[:4] == ["--het-group=0", "--kill-on-bad-exit=1", PYTHONS[0], "-m"] and first[-4:] == COMMAND
    assert second[:4] == ["--het-group=1", "--chdir=/rocm/job", PYTHONS[1], "-m"] and second[-4:] == COMMAND
    for kind in ("jobset", "pytorchjob"):
        made = list(yaml.safe_load_all(manifest(cluster, COMMAND, kind, "train")))[1]["spec"]
        jobs = made.get("replicatedJobs") or made["pytorchReplicaSpecs"].values()
        specs = [job["template"]["spec"] for job in jobs]
        containers = [spec.get("template", {"spec": spec})["spec"]["containers"][0] for spec in specs]
        assert [c["image"] for c in containers] == ["e.com/cuda:1", "e.com/rocm:1"]
        assert [c["workingDir"] for c in containers] == ["/shared", "/rocm/job"]
        for container, python in zip(containers, PYTHONS, strict=False):
            assert python in shlex.split(container["command"][-1].partition("exec ")[2])
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(document(cluster)))
    assert hosts_of(load_cluster(again)) == hosts_of(cluster)
    assert hosts_of(without(cluster, ["cuda"]))[0].python == PYTHONS[1]


def test_one_group_without_an_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.replace(', image: "e.com/cuda:1"', ""))
    with pytest.raises(UserError, match="launch.image.*missing, for cuda"):
        manifest(load_cluster(path), COMMAND, "jobset", "train")


# SLURM


def test_a_batch_script_has_one_component_per_node_group(file: Path) -> None:
    script = batch_script(load_cluster(file), COMMAND, "job", ["-m", "launch"])
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    first, second = script.split("#SBATCH hetjob\n")
    for text, words in ((first, "partition=a nodes=2 gres=gpu:a100:8 nodelist=n1,n2 account=lab time=2:00:00"),
                        (second, "partition=b nodes=3 exclusive")):  # fmt: skip
        for word in words.split():
            assert f"#SBATCH --{word}\n" in text, script
    assert "--het-group=0,1 " in script and script.rstrip().endswith("'a plan.yaml'")


def step(nodelist: str, node: int, tasks: int = 5, **more: str) -> dict[str, str]:
    return {"SLURM_STEP_NODELIST": nodelist, "SLURM_NODEID": str(node), "SLURM_STEP_NUM_TASKS": str(tasks), **more}


def test_a_task_finds_its_host_by_name_in_whatever_order_slurm_has_them(file: Path) -> None:
    cluster = load_cluster(file)
    for node, name in enumerate(("small-0", "small-1", "small-2", "big-0", "big-1")):
        host, hosts = place_of_task(cluster, step("small-[0-2],n[1-2]", node))
        assert host.node == name and hosts[0].address == "n1"


def test_a_task_finds_its_host_by_its_component_where_no_name_is_in_the_file(file: Path) -> None:
    cluster = load_cluster(file)
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "x[7,9]", "SLURM_JOB_NODELIST_HET_GROUP_1": "y[1-3]"}
    for node, name in enumerate(("big-0", "big-1", "small-0", "small-1", "small-2")):
        host, hosts = place_of_task(cluster, step("x[7,9],y[1-3]", node, **lists))
        assert host.node == name and hosts[2].address == "y1"


# Kubernetes


def problems(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """What of a value a JSON schema of tests/fixtures/kubernetes refuses."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, kinds[name]) and (name == "boolean") == isinstance(value, bool) for name in types):
        return [f"{path}: {value!r} is no {types}"]
    found = []
    if isinstance(value, dict):
        found += [f"{path}.{key} is missing" for key in schema["required"] if key not in value]
        for key, item in value.items():
            inner = schema["properties"].get(key, schema["additionalProperties"])
            found += [f"{path}.{key} is unknown"] if inner is False else []
            found += problems(item, inner, f"{path}.{key}") if isinstance(inner, dict) else []
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += problems(item, schema["items"], f"{path}[{index}]")
    elif isinstance(value, str):
        found += [f"{path}: {value!r} is none of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
        if not re.match(schema.get("pattern", ""), value):
            found.append(f"{path}: {value!r} is no {schema['pattern']}")
    elif value < schema.get("minimum", value):
        found.append(f"{path}: {value} is too small")
    return found


def check(documents: list[dict[str, Any]]) -> None:
    for value in documents:
        schema = json.loads((ROOT / f"tests/fixtures/kubernetes/{value['kind'].lower()}.json").read_text())
        assert problems(value, schema) == []


def test_the_checker_finds_what_a_schema_does_not_have() -> None:
    schema = json.loads((ROOT / "tests/fixtures/kubernetes/jobset.json").read_text())
    wrong = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "spec": {"replicated": [], "suspend": 1}}
    assert problems(wrong, schema) == [".spec.replicated is unknown", ".spec.suspend: 1 is no ['boolean']"]


def run_script(container: dict[str, Any], tmp_path: Path, **environment: str) -> dict[str, Any]:
    """What the pod's shell starts: its words and HETERO_NODE; a stand-in takes the place of the interpreter."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$HETERO_NODE" "$@"\n')
    stand_in.chmod(0o755)
    command = [word.replace("$$", "$").replace("/opt/venv/bin/python", str(stand_in)) for word in container["command"]]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    node, *words = done.stdout.splitlines()
    return {"node": node, "rank": words[words.index("--node-rank") + 1], "words": words}


def test_a_job_set_starts_every_node_once(file: Path, tmp_path: Path) -> None:
    config, job = yaml.safe_load_all(manifest(load_cluster(file), COMMAND, "jobset", "train"))
    check([config, job])
    seen = []
    for replicated in job["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        assert spec["completions"] == spec["parallelism"]
        container = spec["template"]["spec"]["containers"][0]
        for index in range(spec["completions"]):
            started = run_script(container, tmp_path, JOB_COMPLETION_INDEX=str(index))
            seen.append((started["node"], started["rank"]))
            assert "train-big-0-0.train" in started["words"] and started["words"][-1] == "a plan.yaml"
    assert seen == [("big-0", "0"), ("big-1", "1"), ("small-0", "2"), ("small-1", "3"), ("small-2", "4")]
    inside = tmp_path / "inside.yaml"
    inside.write_text(config["data"]["cluster.yaml"])
    assert load_cluster(inside).world_size == 28  # ranks can read it


def test_pods_have_chips_memory_and_folders(file: Path) -> None:
    cluster = load_cluster(file)
    _, job = yaml.safe_load_all(manifest(cluster, COMMAND, "jobset", "train"))
    pods = [each["template"]["spec"]["template"]["spec"] for each in job["spec"]["replicatedJobs"]]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods]
    assert limits == [{"example.com/gpu": 8}, {"amd.com/gpu": 4}]  # as the file says; by the chip's vendor
    for pod in pods:
        found = {}
        for mount in pod["containers"][0]["volumeMounts"]:
            volume = next(v for v in pod["volumes"] if v["name"] == mount["name"])
            found[mount["mountPath"]] = ({k: v for k, v in volume.items() if k != "name"}, mount.get("readOnly", False))
        assert found["/dev/shm"] == ({"emptyDir": {"medium": "Memory", "sizeLimit": str(8 << 30)}}, False)
        assert found["/data"] == ({"persistentVolumeClaim": {"claimName": "corpus"}}, True)
        assert found["/shared"] == ({"nfs": {"server": "10.0.0.9", "path": "/export"}}, False)


def test_the_resource_of_every_chip_of_the_catalogue_is_known_or_asked_for() -> None:
    for name, chip in CHIPS.items():
        cluster = cluster_from_dict({"nodes": [{"name": "n", "chip": name}], "launch": {"image": "x"}})
        try:
            made = manifest(cluster, COMMAND, "jobset", "train")
        except UserError as error:
            assert chip.vendor == "Iluvatar CoreX" and chip.vendor in str(error) and "resource:" in str(error)
            continue
        pods = list(yaml.safe_load_all(made))[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (resource,) = pods["containers"][0]["resources"]["limits"]
        own = {"Intel Habana": "habana", "Moore Threads": "mthreads"}.get(chip.vendor, chip.vendor.lower())
        assert resource.startswith(own), (name, resource)


def test_a_pytorch_job_starts_every_node_once(file: Path, tmp_path: Path) -> None:
    file.write_text(CLUSTER.replace("count: 2", "count: 1").replace("hosts: [n1, n2]", "hosts: [n1]"))
    config, job = yaml.safe_load_all(manifest(load_cluster(file), COMMAND, "pytorchjob", "train"))
    check([config, job])
    seen = []
    for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
        container = replica["template"]["spec"]["containers"][0]
        assert container["name"] == "pytorch"  # the operator insists on it
        for index in range(replica["replicas"]):
            started = run_script(container, tmp_path, HOSTNAME=f"train-{kind.lower()}-{index}")
            seen.append((started["node"], started["rank"]))
            assert "train-master-0" in started["words"]
    assert seen == [("big", "0"), ("small-0", "1"), ("small-1", "2"), ("small-2", "3")]


def test_one_group_of_equal_nodes_is_a_master_and_workers(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("nodes: [{name: big, count: 3, chip: H20}]\nlaunch: {image: x, python: /opt/venv/bin/python}\n")
    _, job = yaml.safe_load_all(manifest(load_cluster(file), COMMAND, "pytorchjob", "train"))
    seen = []
    for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
        for index in range(replica["replicas"]):
            container = replica["template"]["spec"]["containers"][0]
            started = run_script(container, tmp_path, HOSTNAME=f"train-{kind.lower()}-{index}")
            seen.append((started["node"], started["rank"]))
    assert seen == [("big-0", "0"), ("big-1", "1"), ("big-2", "2")]
