"""Kubernetes manifests: a JobSet with one replicated job per node group, or Kubeflow's PyTorchJob.

JobSet (jobset.x-k8s.io/v1alpha2) names the pod of index i of a replicated job ``SET-JOB-0-i.SET``, and an Indexed Job
tells each pod its index; so the number of a node and the name of the first one are known before anything runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.catalogue import CHIP_RESOURCES, RESOURCES
from hetero_megatron.cluster.cluster import NodeGroup
from hetero_megatron.cluster.dump import document
from hetero_megatron.cluster.hosts import Volume
from hetero_megatron.errors import UserError
from hetero_megatron.launch.hosts import Host, hosts_of, torchrun
from hetero_megatron.utils.yaml_document import QuotingDumper

CLUSTER_FILE = "/etc/hetero-megatron/cluster.yaml"  # where pods find it, for --cluster of COMMAND
SAVE_SECONDS = 100  # between SIGTERM and SIGKILL
_POD_NAME = 63  # characters
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def manifest(cluster: Cluster, command: Sequence[str], kind: str, name: str, max_restarts: int = 0) -> str:
    """Two YAML documents: a ConfigMap with the cluster file, and the job.

    Args:
        kind: ``jobset`` or ``pytorchjob``.

    Raises:
        UserError: a name that Kubernetes does not take, no image, or node groups that a PyTorchJob cannot say.
    """
    _check_name(name, "--job-name")
    for group in cluster.nodes:
        _check_name(_job(group), "nodes.name", cluster.file)
    for group in cluster.nodes:
        if not (group.settings.image or cluster.launch.image):
            accepted = "launch: {image: REGISTRY/NAME:TAG}, or image: of each node group"
            raise UserError(f"missing, for {group.name}", field="launch.image", accepted=accepted, where=cluster.file)
    _check_pod_names(cluster, name)
    cluster = replace(cluster, launch=replace(cluster.launch, python=cluster.launch.python or "python"))
    job = _job_set if kind == "jobset" else _pytorch_job
    namespace = {"namespace": cluster.launch.namespace} if cluster.launch.namespace else {}
    files = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-cluster", **namespace},
        "data": {"cluster.yaml": yaml.dump(document(cluster), sort_keys=False, Dumper=QuotingDumper)},
    }  # fmt: skip
    job_document = job(cluster, command, {"name": name, **namespace}, max_restarts)
    return yaml.dump_all([files, job_document], sort_keys=False, width=1 << 16, Dumper=QuotingDumper)


def _check_name(name: str, field: str, where: str = "") -> None:
    if not _NAME.fullmatch(name):
        accepted = "at most 40 small letters, digits and -, beginning with a letter"
        raise UserError("is no name in Kubernetes", field=field, value=name, accepted=accepted, where=where)


def _check_pod_names(cluster: Cluster, name: str) -> None:
    """JobSet's admission refuses pods whose names, SET-JOB-0-INDEX-xxxxx, have more than 63 characters."""
    for group in cluster.nodes:
        longest = f"{name}-{_job(group)}-0-{group.count - 1}-xxxxx"
        if len(longest) > _POD_NAME:
            accepted = f"one shorter by {len(longest) - _POD_NAME}, or a shorter name of the node group {group.name}"
            problem = f"its pods' names would have more than {_POD_NAME} characters"
            raise UserError(problem, field="--job-name", value=name, accepted=accepted, where=cluster.file)


def _job(group: NodeGroup) -> str:
    """A node group's name as Kubernetes takes it."""
    return re.sub(r"[._]", "-", group.name.lower())


def _job_set(cluster: Cluster, command: Sequence[str], metadata: dict[str, str], restarts: int) -> dict[str, Any]:
    name = metadata["name"]
    first = cluster.nodes[0]
    master = f"{name}-{_job(first)}-0-0.{name}"
    jobs = []
    for group, host in _first_hosts(cluster):
        pods = _pods(cluster, group, host, command, name, master, "JOB_COMPLETION_INDEX")
        spec = {
            "completionMode": "Indexed", "completions": group.count, "parallelism": group.count, "backoffLimit": 0,
            "template": {"spec": pods},
        }  # fmt: skip
        jobs.append({"name": _job(group), "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": jobs,
        },
    }  # fmt: skip


def _pytorch_job(cluster: Cluster, command: Sequence[str], metadata: dict[str, str], restarts: int) -> dict[str, Any]:
    """Its replicas are one Master and equal Workers, so the cluster is one node, or one and a group of equal ones."""
    groups = _first_hosts(cluster)
    if len(groups) == 1 and groups[0][0].count > 1:  # the first node of the only group is the master
        group, host = groups[0]
        worker_host = replace(host, index=1)
        groups = [(replace(group, count=1), host), (replace(group, count=group.count - 1), worker_host)]
    if len(groups) > 2 or groups[0][0].count > 1:
        raise UserError(
            "a PyTorchJob has one master and workers of one kind", field="--kind", value="pytorchjob",
            accepted="--kind jobset; or a first node group of one node, and at most one other", where=cluster.file,
        )  # fmt: skip
    name, replicas = metadata["name"], {}
    for kind, (group, host) in zip(("Master", "Worker"), groups, strict=False):
        # The operator's name of the master is its service; of a worker, the last part of its host name is its number.
        pods = _pods(cluster, group, host, command, name, f"{name}-master-0", "HOST_INDEX")
        pods["containers"][0]["name"] = "pytorch"
        if kind == "Master":
            pods["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": cluster.launch.master_port}]
        replicas[kind] = {"replicas": group.count, "restartPolicy": "OnFailure", "template": {"spec": pods}}
        pods.pop("restartPolicy")
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata,
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": restarts}, "pytorchReplicaSpecs": replicas,
        },
    }  # fmt: skip


def _first_hosts(cluster: Cluster) -> list[tuple[NodeGroup, Host]]:
    hosts = hosts_of(cluster)
    return [(group, next(host for host in hosts if host.group == group.name)) for group in cluster.nodes]


def _pods(
    cluster: Cluster, group: NodeGroup, host: Host, command: Sequence[str], name: str, master: str, index: str
) -> dict[str, Any]:
    """The specification of a group's pods; ``index``: the variable that counts them."""
    hosts = hosts_of(cluster)
    words = torchrun(host, hosts, cluster, command, node_rank="NODE_RANK", master=master)
    line = " ".join("$NODE_RANK" if word == "NODE_RANK" else shlex.quote(word) for word in words)
    counted = f"NODE_RANK=$(({host.index} + {index}))"
    if index == "HOST_INDEX":  # of a PyTorchJob: NAME-worker-3
        counted = f"HOST_INDEX=${{HOSTNAME##*-}}; {counted}"
    whole_group = next(g for g in cluster.nodes if g.name == group.name)
    first_index = next(h.index for h in hosts if h.group == group.name)
    node_name = shlex.quote(whole_group.name) + ("" if whole_group.count == 1 else f"-$((NODE_RANK - {first_index}))")
    script = f"{counted}; export HETERO_NODE={node_name}; exec {line}"
    container: dict[str, Any] = {
        "name": "ranks", "image": whole_group.settings.image or cluster.launch.image,
        "command": ["/bin/sh", "-c", literal(script)],
        "env": [*_variables(host.environment), _secret(name)],
    }  # fmt: skip
    volumes, container["volumeMounts"] = _volumes(cluster, name)
    if host.directory:
        container["workingDir"] = host.directory
    if resource := _resource(cluster, group):
        container["resources"] = {"limits": {resource: group.chips_per_node}}
    selector = {"nodeSelector": dict(group.settings.node_selector)} if group.settings.node_selector else {}
    return {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": SAVE_SECONDS, **selector,
        "containers": [container], "volumes": volumes,
    }  # fmt: skip


def _resource(cluster: Cluster, group: NodeGroup) -> str:
    """What a chip is called by its vendor's device plugin; "" where that is not known, or the chip is emulated.

    Raises:
        UserError: the file says nothing of it, either.
    """
    chip = cluster.chips[group.chip]
    if group.settings.resource or chip.speed is not None:
        return group.settings.resource
    resource = next((name for names, name in CHIP_RESOURCES.items() if group.chip.startswith(names)), "")
    if not resource and not (resource := RESOURCES.get(chip.vendor, "")) and chip.vendor:
        accepted = "resource: of the node group, as the device plugin of its vendor names it (kubectl describe node)"
        problem = f"no resource is known for chips of {chip.vendor}"
        raise UserError(problem, field=f"nodes: {group.name}", accepted=accepted, where=cluster.file)
    return resource


def _volumes(cluster: Cluster, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes of a pod, where its container has them): the cluster file, /dev/shm, which is 64 MiB without a volume,
    and the shared folders."""
    settings = cluster.launch
    memory = {"medium": "Memory", **({"sizeLimit": str(settings.shm)} if settings.shm else {})}
    volumes: list[dict[str, Any]] = [
        {"name": "cluster", "configMap": {"name": f"{name}-cluster"}}, {"name": "shm", "emptyDir": memory},
    ]  # fmt: skip
    mounts: list[dict[str, Any]] = [
        {"name": "cluster", "mountPath": CLUSTER_FILE.rpartition("/")[0], "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for index, volume in enumerate(settings.volumes):
        volumes.append({"name": f"shared-{index}", **_source(volume)})
        read_only = {"readOnly": True} if volume.read_only else {}
        mounts.append({"name": f"shared-{index}", "mountPath": volume.path, **read_only})
    return volumes, mounts


def _source(volume: Volume) -> dict[str, Any]:
    if volume.claim:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.host:
        return {"hostPath": {"path": volume.host, "type": "Directory"}}
    server, _, path = volume.nfs.partition(":")
    return {"nfs": {"server": server, "path": path}}


def literal(text: str) -> str:
    """``text`` as Kubernetes gives it to a container: in ``command``, ``args`` and values of ``env``, it replaces
    ``$(NAME)`` by a variable's value, and ``$$`` by ``$``."""
    return text.replace("$", "$$")


def _variables(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    variables = {**environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS - 10)}
    return [{"name": key, "value": literal(value)} for key, value in variables.items() if key != "HETERO_NODE"]


def _secret(name: str) -> dict[str, Any]:
    """kubectl create secret generic NAME-secret --from-literal=value=$(openssl rand -hex 32); without it: none."""
    reference = {"name": f"{name}-secret", "key": "value", "optional": True}
    return {"name": "HETERO_JOB_SECRET", "valueFrom": {"secretKeyRef": reference}}
