"""Public measurements as runs of the predictor: vTrain's A100 tables, Sailor's GH200 plans, Megatron's published times.

What each system does otherwise than our runtime is said in :class:`CostOptions` here, from papers and code, not fitted.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.modelled_operators import UPDATE_BYTES
from hetero_megatron.predictor.cost.rates import Rates, load_rates, model_fingerprint
from hetero_megatron.predictor.measured_runs import MeasuredRun
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.presets import gpt

DATA = Path(os.environ.get("HETERO_PUBLIC_DATA") or Path(__file__).resolve().parent.parent / "shared" / "data")

# Megatron-DeepSpeed 2022: fp16 all-reduce after the last backward, whole optimizer on every replica, all-reduces in TP;
# its fused softmax is for sequences x local heads that 4 divides (FusedScaleMaskSoftmax.is_kernel_available).
DEEPSPEED = CostOptions(
    overlap=False, sharded=False, gradient_bytes=2, sequence_parallel=False, whole_transfers=True, blocking=True,
    softmax_batches=4,
)  # fmt: skip
# Sailor trains in fp32 with the same framework.
SAILOR = replace(DEEPSPEED, gradient_bytes=4)


WHERE = (
    f"the public measurements are not in {DATA}: set HETERO_PUBLIC_DATA to a folder with vtrain/ (measured_*.csv of "
    "github.com/VIA-Research/vTrain) and sailor/ (profiles, llm_info and configurations of Sailor, SOSP'25)"
)


def data(name: str) -> Path | None:
    """A file or folder of the public data; None where it is not there."""
    return DATA / name if (DATA / name).exists() else None


def a100_cluster(nodes: int) -> Cluster:
    """DGX A100 nodes with eight 200 Gb cards: vTrain's and Selene's machines."""
    return cluster_from_dict(
        {
            "nodes": [{"name": "dgx", "count": nodes, "chip": "A100-80-SXM", "chips_per_node": 8}],
            "links": {"inter_node": {"bandwidth": "200 GB/s", "latency": "20 us"}},
        }
    )


def with_optimizer_rate(rates: Rates) -> Rates:
    """The optimizer's rate as a table of its own, so that a fit can move it apart from other bandwidth."""
    chips = {
        name: replace(chip, optimizer=((1e9, 1e9 * UPDATE_BYTES / chip.bytes_per_second),))
        for name, chip in rates.chips.items()
    }
    return replace(rates, chips=chips)


def vtrain(kind: str, recompute: bool) -> list[MeasuredRun]:
    """``single`` (2-8 GPUs) or ``multi`` (64-512 GPUs); vocabulary 51,200 and full recomputation are assumptions."""
    path = data(f"vtrain/measured_{kind}.csv")
    assert path is not None
    runs = []
    with path.open(encoding="utf-8") as file:
        for line, row in enumerate(list(csv.reader(file))[1:], start=2):
            sizes = [int(float(x)) for x in row[-11:-1]]
            gpus, batch, micro, hidden, heads, layers, seq, tp, _, pp = sizes
            model = gpt(f"gpt-{hidden}-{layers}", layers, hidden, heads, positions=seq)
            plan = megatron_plan(model, gpus, seq, micro, batch, tp, pp, "full" if recompute else None)
            runs.append(MeasuredRun(plan, model, float(row[-1]) / 1e3, f"{kind}:{line}"))
    return runs


def megatron_plan(
    model: ModelSpec, gpus: int, seq: int, micro: int, batch: int, tp: int, pp: int, recompute: str | None
) -> Plan:
    whole = recompute == "full"
    flags = MegatronParallel(
        gpus, seq, micro, batch, tp, pp, recompute_granularity=recompute,
        recompute_method="uniform" if whole else None, recompute_num_layers=1 if whole else None,
    )  # fmt: skip
    return from_megatron(flags, model)


@dataclass(frozen=True)
class Published:
    """A row of Korthikanti et al., table 5: seconds with full recompute, and with selective recompute + SP."""

    model: str
    gpus: int
    pp: int
    batch: int
    micro: int
    chunks: int  # virtual stages per rank
    full: float
    selective: float


MEGATRON = (
    Published("megatron-22b", 8, 1, 4, 4, 1, 1.42, 1.10),
    Published("gpt3-175b", 64, 8, 64, 1, 3, 18.13, 13.75),
    Published("megatron-530b", 280, 35, 280, 1, 3, 49.05, 37.83),
    Published("megatron-1t", 512, 64, 512, 1, 1, 94.42, 71.49),
)


def sailor_runs() -> list[tuple[MeasuredRun, dict[str, Any]]]:
    """Sailor's 15 GH200 plans (TP 4 in nodes of four) with the file's other values."""
    folder = data("sailor/validation")
    assert folder is not None
    model = load_model("opt-350m")
    out = []
    for path in sorted(folder.glob("*.json")):
        given = json.loads(path.read_text())
        (pipeline,) = given["pipeline_list"]
        replicas, stages = pipeline["dp"][0], pipeline["layers_per_stage"]
        batch, micro = given["gbs"], given["mbs"]
        spelled: list[dict[str, Any]] = []
        for replica in range(replicas):
            rank, layer, rows = replica * len(stages) * 4, 0, []
            for ids in stages:
                count = len([i for i in ids if 1 <= i <= model.num_layers])  # 0 is the embedding, 25 the head
                rows.append({"ranks": list(range(rank, rank + 4)), "tp": 4, "layers": [layer, layer + count]})
                rank, layer = rank + 4, layer + count
            spelled.append({"micro_batch_size": micro, "num_micro_batches": batch // replicas // micro, "stages": rows})
        plan = plan_from_dict({"seq_length": 2048, "global_batch_size": batch, "pipelines": spelled}, model)
        out.append((MeasuredRun(plan, model, given["real"], path.stem.removeprefix("plan_config_")), given))
    return out


def sailor_rates(nodes: int) -> Rates:
    """Sailor's own profile of OPT-350M on GH200 as whole-layer rows; its network table as links."""
    profiles, network = data("sailor/profiles.json"), data("sailor/network_coeffs_all_homo.json")
    assert profiles is not None and network is not None
    model = load_model("opt-350m")
    mark = model_fingerprint(model)
    rows: dict[str, list[list[Any]]] = {"layers": [], "embed": [], "head": [], "optimizer": []}
    profile = json.loads(profiles.read_text())["OPT-350"]["GH-96"]
    for micro, by_tp in profile.items():
        by_layer = by_tp.get("4", {})
        if not by_layer:
            continue
        last = str(model.num_layers + 1)
        inner = [by_layer[str(i)] for i in range(1, model.num_layers + 1)]
        median = [statistics.median(values) for values in zip(*inner)]  # of equal layers: profiles have outliers
        for table, (forward, backward) in (
            ("embed", by_layer["0"][:2]), ("layers", median[:2]), ("head", by_layer[last][:2]),
        ):  # fmt: skip
            rows[table].append([mark, 4, int(micro), 2048, forward, backward])
        if micro == "8":
            # The profile gives the embedding (54 million parameters) and a layer (13 million) one and the same update
            # time, which falls with the TP degree and rises with 1 / memory bandwidth from GPU to GPU: it is that of
            # the whole model that was profiled. Sailor's simulator, too, counts it once per stage, not per layer.
            whole = sum(sailor_parameters(str(i)) for i in range(model.num_layers + 2))
            rows["optimizer"] = [[whole, median[2]]]
    bandwidth = json.loads(network.read_text())["inter"]["GH-96"]["4"][1]
    nothing = {"layer_seconds": 0.0, "action_seconds": 0.0, "message_seconds": 0.0, "step_seconds": 0.0}
    flops = {"gemm_flops": 3e14, "attention_flops": 1e14, "bytes_per_second": 3.4e12, "overhead_bytes": 0}
    cluster = cluster_from_dict(
        {
            "nodes": [{"name": "gh", "count": nodes, "chip": "GH200", "chips_per_node": 4}],
            "chips": {
                "GH200": {"memory": "96 GB", "dtypes": ["fp32"], "rates": {"fp32": {**rows, **nothing, **flops}}}
            },
            # The profile was taken with TP 4 inside a node, so it holds those collectives already.
            "rates": {
                "links": [
                    {"within": "gh", "beta": 1e-30},
                    {"between": ["gh", "gh"], "alpha": 2e-5, "beta": 1 / bandwidth},
                ]
            },
        }
    )
    return load_rates(cluster, "fp32")


def sailor_parameters(layer: str) -> float:
    """Parameters of one of Sailor's layers on one rank of TP 4."""
    return float(sailor_info()[layer]["params_floats"])


def sailor_info() -> dict[str, Any]:
    path = data("sailor/llm_info.json")
    assert path is not None
    found: dict[str, Any] = json.loads(path.read_text())["OPT-350"]["4"]
    return found
