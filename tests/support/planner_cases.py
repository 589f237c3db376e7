"""Small clusters and models with round rates, for tests of the planner that are computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.spec import ModelSpec, load_model

SEQ = 64
NOTHING = 1e-15
MODEL = replace(load_model("tiny"), num_layers=11)


def chip_rates(forward: float, model: ModelSpec = MODEL, **more: Any) -> dict[str, Any]:
    """Rates by which a layer takes ``forward`` s and twice that for one sequence; all else takes nothing."""
    mark = model_fingerprint(model)
    free = [[mark, 1, 1, SEQ, NOTHING, NOTHING]]
    return {
        "gemm_flops": 1e30, "bytes_per_second": 1e30, "attention_flops": 1e30, "layer_seconds": 0.0,
        "action_seconds": 0.0, "message_seconds": 0.0, "step_seconds": 0.0, "overhead_bytes": 0,
        "layers": [[mark, 1, 1, SEQ, forward, 2 * forward]], "embed": free, "head": free,
        "optimizer": [[1.0, NOTHING]], **more,
    }  # fmt: skip


def cluster(
    nodes: int = 2,
    per_node: int = 1,
    beta: float = 1e-30,
    alpha: float = 0.0,
    model: ModelSpec = MODEL,
    memory: str = "64 GiB",
    speeds: tuple[float, ...] = (),
    **more: Any,
) -> Cluster:
    """``nodes`` nodes of chip c0 (a layer takes 1 s), or one node group per entry of ``speeds`` (seconds per layer)."""
    kinds = speeds or (1.0,)
    links = []
    names = [f"n{i}" for i in range(len(kinds))]
    for a in names:
        links.append({"within": a, "alpha": alpha, "beta": beta})
        links += [{"between": [a, b], "alpha": alpha, "beta": beta} for b in names]
    return cluster_from_dict(
        {
            "nodes": [
                {"name": name, "count": nodes if not speeds else 1, "chip": f"c{i}", "chips_per_node": per_node}
                for i, name in enumerate(names)
            ],
            "chips": {
                f"c{i}": {"memory": memory, "dtypes": ["fp32"], "communicators": {"each": "1 B", "peer": "1 B"}}
                for i in range(len(kinds))
            },
            "rates": {
                "chips": {f"c{i}": {"fp32": chip_rates(s, model, **more)} for i, s in enumerate(kinds)},
                "links": links,
            },
        }
    )


def stages(*layers: int, tp: int = 1, first_rank: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Stages of these sizes on consecutive ranks."""
    out, rank, layer = [], first_rank, 0
    for count in layers:
        out.append({"ranks": list(range(rank, rank + tp)), "tp": tp, "layers": [layer, layer + count], **more})
        rank, layer = rank + tp, layer + count
    return out


def plan(*pipelines: tuple[int, list[dict[str, Any]]], mbs: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    """(micro-batches, stages) per pipeline."""
    return {
        "seq_length": SEQ,
        "global_batch_size": sum(n for n, _ in pipelines) * mbs,
        "schedule": schedule,
        "pipelines": [{"micro_batch_size": mbs, "num_micro_batches": n, "stages": s} for n, s in pipelines],
    }
