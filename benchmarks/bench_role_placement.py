"""Predicted: the planned placement of a teacher beside all roles on all chips and old chips that hold the teacher, on
small clusters of which one kind of chips is three times as fast. Nothing is run.

    .venv/bin/python benchmarks/bench_role_placement.py
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import geometric_mean

import hetero_megatron as hm
from hetero_megatron.api.roles import place_role
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.role_placement import RoleSearch

LENGTH, BATCH = 1024, 16
CLUSTER = """version: 1
nodes: [{{name: new, chip: fast, chips_per_node: {0}}}, {{name: old, chip: slow, chips_per_node: {1}}}]
chips:
  fast: {{memory: 24 GiB, tflops: {{bf16: 120}}, memory_bandwidth: 900 GB/s}}
  slow: {{memory: 16 GiB, tflops: {{bf16: 40}}, memory_bandwidth: 450 GB/s}}
links: {{intra_node: {{bandwidth: 20 GB/s, latency: 10 us}}, inter_node: {{bandwidth: 1.2 GB/s, latency: 30 us}}}}
"""


def model(layers: int, hidden: int) -> hm.Model:
    return hm.Model({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": 2816,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "max_position_embeddings": 4096,
    })  # fmt: skip


def on_old_chips(cluster: hm.Cluster, student: hm.Model, teacher: hm.Model) -> float:
    """Seconds of a step with the teacher on the slow chips; inf: one of both does not fit."""
    described = cluster.described
    options = SearchOptions(space=SearchSpace(more_schedules="never"))
    asked = ForwardQuestion("teacher", teacher.spec, LENGTH, BATCH, "bf16", options.costs, 129)
    problem = PlanningProblem(student.spec, described, LENGTH, BATCH, options)
    slow = frozenset(rank.rank for rank in described.ranks if rank.chip == "slow")
    try:
        return RoleSearch(problem, asked).on_ranks(slow).step_seconds
    except UserError:
        return math.inf


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    student, gains, beaten = model(16, 1024), list[float](), 0
    print("| fast + slow | teacher's layers | chosen | s | same chips | old chips | against the better |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for fast, slow in ((2, 2), (1, 3), (3, 1)):
            path = Path(folder) / "cluster.yaml"
            path.write_text(CLUSTER.format(fast, slow))
            cluster = hm.Cluster.read(path)
            for layers in (8, 32, 96):
                teacher = model(layers, 1024)
                placed = place_role(student, cluster, "teacher", teacher, seq_length=LENGTH, global_batch_size=BATCH,
                                    more_schedules="never")  # fmt: skip
                same = next(one for one in placed.placement.alternatives if one.way == "same chips").step_seconds
                old = on_old_chips(cluster, student, teacher)
                better = min(same, old)
                gains.append(better / placed.step_seconds)
                beaten += placed.step_seconds > 1.001 * better
                chosen = f"{placed.placement.best.way} | {placed.step_seconds:.3f}"
                seconds = f"{same:.3f} | {old:.3f} | {gains[-1]:.2f} x"
                print(f"| {fast} + {slow} | {layers} | {chosen} | {seconds} |", flush=True)
    mean = geometric_mean(gains)
    print(f"\ngeometric mean against the better of the two: {mean:.2f} x; slower than it: {beaten} of {len(gains)}")


if __name__ == "__main__":
    main()
