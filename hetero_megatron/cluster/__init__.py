"""Clusters: chips, nodes, links and their rates. No torch."""

from hetero_megatron.cluster.catalogue import CHIPS, Chip
from hetero_megatron.cluster.cluster import (
    BRIDGE_CHUNK,
    BRIDGE_RATE,
    BRIDGE_SMALLEST_CHUNK,
    BRIDGE_STRIPES,
    Cluster,
    Link,
    NodeGroup,
    Rank,
)
from hetero_megatron.cluster.cluster_file import cluster_from_dict, load_cluster
from hetero_megatron.cluster.units import format_bytes, format_rate, quantity

__all__ = [
    "BRIDGE_CHUNK",
    "BRIDGE_RATE",
    "BRIDGE_SMALLEST_CHUNK",
    "BRIDGE_STRIPES",
    "CHIPS",
    "Chip",
    "Cluster",
    "Link",
    "NodeGroup",
    "Rank",
    "cluster_from_dict",
    "format_bytes",
    "format_rate",
    "load_cluster",
    "quantity",
]
