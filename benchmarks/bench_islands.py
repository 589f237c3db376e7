"""Gradient sums over two islands: first inside each, then between them, against straight to the owners.

    python benchmarks/bench_islands.py [--ranks 3] [--rates "100 MB/s" "25 MB/s"] [--rounds 5]

Two nodes of the testbed with ``--ranks`` data-parallel ranks each; only the link between the nodes is slow. The sums of
all buckets are timed alone, packing and adding included. Straight, every element crosses the link once per rank of an
island; by islands, once: the ratio's ceiling is ``--ranks``. Both ways alternate in one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_overlap import together
from benchmarks.common import alternate, machine, median
from benchmarks.testbed_run import emulated_cluster

MODEL = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1408, "vocab_size": 512, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


def run(size: int, rounds: int) -> None:
    import torch

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.plans.islands import crossing
    from hetero_megatron.platform import Platform
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.runtime import Runtime

    spec, world = from_hf_config(MODEL), 2 * size
    pipelines = [
        {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [{"ranks": [r], "layers": [0, spec.num_layers]}]}
        for r in range(world)
    ]
    plan = {"seq_length": 64, "global_batch_size": world, "pipelines": pipelines}
    islands = [list(range(size)), list(range(size, world))]
    ways = {"straight": plan, "islands": {**plan, "islands": islands}}
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 120)
    runtimes, found = dict[str, Runtime](), dict[str, dict[str, Any]]()
    for name, data in ways.items():
        compiled = CompiledPlan(plan_from_dict(data, spec), spec)
        comm.create_groups(compiled.groups)
        runtimes[name] = Runtime(compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0), None)
        found[name] = {"seconds": [], "direct": crossing(compiled).direct, "planned": crossing(compiled).planned}
    for i in range(rounds + 1):
        for name, runtime in runtimes.items():
            sync = runtime.sync
            for parameter in sync.params:
                sync.sums.sum(parameter)
            seconds = together(runtime, sync.finish)
            if i:  # the first round warms up
                found[name]["seconds"].append(seconds)
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    runtime.world.gather_vectors(torch.zeros(1))
    stop_comm()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="of an island")
    parser.add_argument("--rates", nargs="+", default=["100 MB/s", "25 MB/s"], help="of the link between the islands")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        run(args.ranks, args.rounds)
        return
    print(f"{machine()}; 2 islands of {args.ranks} ranks, gloo, 1 thread each, fp32, {args.rounds} rounds in turn")
    print(f"{'link':<12}{'straight ms':>13}{'islands ms':>13}{'ratio':>8}{'ceiling':>9}{'MB that cross':>22}")
    for rate in args.rates:
        with tempfile.TemporaryDirectory() as folder:
            cluster = Path(folder) / "cluster.json"
            cluster.write_text(json.dumps(emulated_cluster([("node", 2, args.ranks, 0.3, "2 GiB")], rate)))
            words = ["-m", "hetero_megatron.cli.main", "testbed", "run", "--chips", "none", "--cluster", str(cluster)]
            job = [sys.executable, __file__, "--job", "--ranks", str(args.ranks), "--rounds", str(args.rounds)]
            result = alternate({"all": [*words, "--", *job]}, 1, timeout=400)["all"][0]
        ms = {name: median(one["seconds"]) * 1e3 for name, one in result.items()}
        bytes_ = f"{result['islands']['direct'] / 1e6:.1f} -> {result['islands']['planned'] / 1e6:.1f}"
        ratio = ms["straight"] / ms["islands"]
        print(f"{rate:<12}{ms['straight']:>13.1f}{ms['islands']:>13.1f}{ratio:>8.2f}{args.ranks:>9}{bytes_:>22}")


if __name__ == "__main__":
    main()
