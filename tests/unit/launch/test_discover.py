"""``cluster discover``: devices by the names of their drivers, and what is written for hosts."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.cluster.cluster_file import cluster_from_dict
from hetero_megatron.launch.discover import catalogue_name, cluster_document
from hetero_megatron.launch.hosts import hosts_of

GIB = 2**30
NAMES = {  # as torch.cuda.get_device_name gives them, with what is left of their memory
    ("NVIDIA A100-SXM4-80GB", 79.2): "A100-80-SXM", ("NVIDIA A100-SXM4-40GB", 39.4): "A100-40-SXM",
    ("NVIDIA A100 80GB PCIe", 79.2): "A100-80-PCIe", ("NVIDIA H100 80GB HBM3", 79.1): "H100-SXM",
    ("NVIDIA H100 PCIe", 79.2): "H100-PCIe", ("NVIDIA H200", 139.8): "H200-SXM", ("NVIDIA L40S", 44.4): "L40S",
    ("NVIDIA GeForce RTX 4090", 23.6): "RTX4090", ("AMD Instinct MI300X", 191.5): "MI300X",
    ("AMD Instinct MI250X", 63.98): "MI250X-GCD", ("AMD Instinct MI250", 63.98): "MI250-GCD",
    ("Tesla V100-SXM2-32GB", 31.7): "V100-32-SXM2", ("Tesla V100-SXM2-16GB", 15.8): "V100-16-SXM2",
    ("Tesla T4", 14.6): "T4", ("Ascend910B3", 61.3): "Ascend-910B", ("NVIDIA H20", 95.6): "H20",
    ("NVIDIA A10G", 22.1): "A10G", ("Tesla P100-PCIE-16GB", 15.9): "P100-16-PCIe",
    ("AMD Radeon PRO W6800", 29.98): "W6800", ("NVIDIA A2", 14.6): None,
    ("NVIDIA H100 NVL", 93.6): None, ("Some Chip 9000", 64.0): None,
}  # fmt: skip


@pytest.mark.parametrize(("device", "chip"), NAMES.items(), ids=str)
def test_devices_of_the_catalogue(device: tuple[str, float], chip: str | None) -> None:
    name, memory = device
    assert catalogue_name(name, memory * GIB) == chip
    assert chip is None or chip in CHIPS


def answer(device: str = "", memory: float = 0.0, count: int = 0, **more: Any) -> dict[str, Any]:
    chips = [{"name": device, "memory": memory * GIB}] * count
    usual = {"hostname": "h", "accelerator": "x", "cores": 8, "memory": 64.0 * GIB, "interfaces": ["lo", "eth0"]}
    return {**usual, "chips": chips, **more}


def test_alike_hosts_in_a_row_are_one_group_and_ranks_keep_the_order() -> None:
    h200, odd = answer("NVIDIA H200", 139.8, 8), answer("Odd", 32, 2, measured={"fp32": 1e13, "copy": 5e11})
    answers = {"10.0.0.1": h200, "10.0.0.2": h200, "10.0.0.3": odd, "10.0.0.4": h200, "n5": answer(hostname="cpu5")}
    document, notices = cluster_document(answers)
    cluster = cluster_from_dict(document)
    assert [host.address for host in hosts_of(cluster)] == list(answers)
    assert [(g.chip, g.count, g.chips_per_node) for g in cluster.nodes] == [
        ("H200-SXM", 2, 8), ("Odd", 1, 2), ("H200-SXM", 1, 8), ("cpu-8-cores", 1, 1),
    ]  # fmt: skip
    assert cluster.chips["Odd"].flops == {"fp32": 1e13} and cluster.chips["Odd"].memory_bandwidth == 5e11
    assert all(group.settings.interface == "eth0" for group in cluster.nodes)
    assert any("Odd" in notice for notice in notices) and any("no accelerator" in notice for notice in notices)


def test_an_interface_is_named_where_there_is_no_choice() -> None:
    for interfaces, chosen in ((["lo", "eth0", "docker0"], "eth0"), (["lo", "eth0", "ib0"], ""), (["lo"], "")):
        document, _ = cluster_document({"n": answer(interfaces=interfaces)})
        assert document["nodes"][0].get("interface", "") == chosen
