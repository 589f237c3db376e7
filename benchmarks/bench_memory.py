"""Predicted against measured peak memory of every rank, on real processes (CPU, gloo).

    python benchmarks/bench_memory.py [--only NAME …] [--steps 2] [--heap] [--live]

Measured: the process's peak resident set less its resident set before the model is built, with MALLOC_ARENA_MAX=1 and
MALLOC_MMAP_THRESHOLD_=65536: without the latter, glibc comes to keep tensors of up to 32 MB in its heap, whose holes
stay resident (``--heap`` leaves it so). Predicted: the planner's estimate, and what libraries take on a first step,
which is measured once per dtype with a model of a few kilobytes. ``--live`` runs every plan once more, counting the
bytes of live tensors: what the estimate describes, without allocator and libraries. Goal: within 5 % on ranks of at
least 300 MB. The first of ``--steps`` steps has one micro-batch per pipeline: it makes the optimizer's states.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.memory.of_plan import MemoryBytes, estimate_memory
from hetero_megatron.spec import ModelSpec

ROOT = Path(__file__).resolve().parent.parent
LEAST = 300e6  # bytes
MODEL = {
    "name": "bench", "hf_model_type": "llama", "num_layers": 12,
    "hidden_size": 512, "ffn_hidden_size": 1408, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 2048,
}  # fmt: skip
SMALL = {**MODEL, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 2, "num_kv_heads": 1,
         "head_dim": 32, "vocab_size": 128}  # fmt: skip
SEQ_LENGTH = 256


def stage(ranks: list[int], a: int, b: int, **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "layers": [a, b], **more}


@dataclass(frozen=True)
class Case:
    """A plan: (micro-batch size, micro-batches, stages) of each pipeline; ``changes`` of the model."""

    pipelines: list[tuple[int, int, list[dict[str, Any]]]]
    dtype: str = "fp32"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return {**MODEL, **self.changes}

    @property
    def plan(self) -> dict[str, Any]:
        rows = [{"micro_batch_size": b, "num_micro_batches": m, "stages": s} for b, m, s in self.pipelines]
        return {
            "version": 1, "seq_length": SEQ_LENGTH, "global_batch_size": sum(b * m for b, m, _ in self.pipelines),
            "schedule": "1f1b", "pipelines": rows,
        }  # fmt: skip

    def estimate(self) -> dict[int, MemoryBytes]:
        spec = ModelSpec(**self.model)
        return estimate_memory(plan_from_dict(self.plan, spec), spec, self.dtype)


ONE = [(2, 2, [stage([0], 0, 12)])]
TWO = [(4, 3, [stage([0], 0, 6), stage([1], 6, 12)])]
WIDE = {"num_layers": 4, "vocab_size": 16384}
LARGE = {"hidden_size": 1024, "ffn_hidden_size": 2816, "num_heads": 16, "num_kv_heads": 8}
FOUR_LAYERS = [(4, 2, [stage([0], 0, 4)])]
CASES = {
    "one rank": Case(ONE),
    "one rank, bf16": Case(ONE, "bf16"),
    "vocabulary of 16,384": Case(FOUR_LAYERS, changes=WIDE),
    "vocabulary of 16,384, bf16": Case(FOUR_LAYERS, "bf16", WIDE),
    "pp 7 + 5": Case([(4, 3, [stage([0], 0, 7), stage([1], 7, 12)])]),
    "pp 6 + 6, bf16": Case(TWO, "bf16"),
    "pp 3 + 4 + 5": Case([(4, 4, [stage([0], 0, 3), stage([1], 3, 7), stage([2], 7, 12)])]),
    "pp 2 + 3 + 3 + 4": Case(
        [(4, 5, [stage([0], 0, 2), stage([1], 2, 5), stage([2], 5, 8), stage([3], 8, 12)])]
    ),
    "pp 5 + 7, full recompute": Case(
        [(8, 3, [stage([0], 0, 5, recompute="full"), stage([1], 5, 12, recompute="full")])]
    ),
    "pp 6 + 6, first 3, selective": Case(
        [(4, 3, [stage([0], 0, 6, recompute={"first": 3}), stage([1], 6, 12, recompute="selective")])]
    ),
    "tp 2": Case([(4, 2, [stage([0, 1], 0, 12, tp=2)])]),
    "tp 2 + tp 1, bf16": Case([(4, 3, [stage([0, 1], 0, 8, tp=2), stage([2], 8, 12)])], "bf16"),
    "tp 3:1": Case([(4, 2, [stage([0, 1], 0, 12, tp_split=[3, 1])])]),
    "dp, unequal": Case([(3, 2, [stage([0], 0, 12)]), (2, 2, [stage([1], 0, 12)])]),
    "dp of 3, bf16": Case([(2, 2, [stage([r], 0, 12)]) for r in range(3)], "bf16"),
    "one rank beside pp 8 + 4": Case(
        [(2, 2, [stage([0], 0, 12)]), (4, 3, [stage([1], 0, 8), stage([2], 8, 12)])]
    ),
    "dp 2 x pp 2, unequal cuts": Case(
        [(4, 3, [stage([0], 0, 5), stage([1], 5, 12)]),
         (4, 3, [stage([2], 0, 7, recompute="full"), stage([3], 7, 12)])]
    ),
    "weights 3:1": Case([(4, 2, [stage([0, 1], 0, 12, dp_split=[2, 2], weights={"shard": [3, 1]})])], changes=LARGE),
    "weights 3:1, rows 1:3": Case(
        [(4, 2, [stage([0, 1], 0, 12, dp_split=[1, 3], weights={"shard": [3, 1]})])], changes=LARGE
    ),
    "weights 3:1, bf16": Case(
        [(4, 2, [stage([0, 1], 0, 12, dp_split=[2, 2], weights={"shard": [3, 1]})])], "bf16", LARGE
    ),
}  # fmt: skip


def overhead(dtype: str, args: argparse.Namespace) -> int:
    """Bytes that libraries take on a first step."""
    stages = [stage([0], 0, 1), stage([1], 1, 2, recompute="full")], [stage([2], 0, 2)]
    small = Case([(1, 4, found) for found in stages], dtype, SMALL)
    needs = small.estimate()
    most = max(found["peak"] - needs[r].total for r, found in enumerate(measure(small, args.steps, args.heap)))
    print(f"{dtype}: libraries on a first step: {most / 1e6:.0f} MB (of a model of a few kilobytes)")
    return most


def measure(case: Case, steps: int, heap: bool, live: bool = False) -> list[dict[str, int]]:
    """By rank: bytes by which it grew, or, with ``live``, of its tensors."""
    world = sum(len(s["ranks"]) for _, _, stages in case.pipelines for s in stages)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        path = Path(folder)
        work = {
            "model": case.model, "plan": case.plan, "dtype": case.dtype, "steps": steps, "live": live,
            "out": str(path / "out.json"),
        }  # fmt: skip
        (path / "work.json").write_text(json.dumps(work))
        common = {
            **os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if not heap:
            common["MALLOC_MMAP_THRESHOLD_"] = "65536"
        command = [sys.executable, str(ROOT / "benchmarks" / "memory_job.py"), str(path / "work.json")]
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(world)
        ]  # fmt: skip
        errors = [process.communicate()[1] for process in ranks]
        if any(process.returncode for process in ranks):
            raise SystemExit("\n".join(e[-2000:] for e in errors))
        return json.loads((path / "out.json").read_text())  # type: ignore[no-any-return]


def row(name: str, case: Case, libraries: dict[str, int], args: argparse.Namespace) -> Iterator[float]:
    """Print a case's ranks; yields the errors that count."""
    needs = case.estimate()
    live = measure(case, args.steps, args.heap, live=True) if args.live else None
    for rank, found in enumerate(measure(case, args.steps, args.heap)):
        n = needs[rank]
        predicted, measured = n.total + libraries[case.dtype], found["peak"]
        error = predicted / measured - 1
        state = n.weights + n.gradients + n.optimizer
        cells = [f"{x / 1e6:.0f}" for x in (state, n.activations, n.buffers, predicted, measured)]
        less = "" if measured >= LEAST else " (below 300 MB: does not count)"
        if live is not None:
            less += f" | {n.total / 1e6:.0f} | {live[rank]['live'] / 1e6:.0f} | {n.total / live[rank]['live'] - 1:+.1%}"
        print(f"| {name} | {rank} | {' | '.join(cells)} | {error:+.1%}{less} |", flush=True)
        if args.verbose:
            print({k: round(v / 1e6) for k, v in found.items()})
        if measured >= LEAST:
            yield abs(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--heap", action="store_true", help="glibc's own threshold between heap and mmap")
    parser.add_argument("--live", action="store_true", help="once more, counting bytes of live tensors")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    print(f"{machine()}; {MODEL['hidden_size']} wide, {SEQ_LENGTH} tokens; {'heap' if args.heap else 'mmap'}")
    libraries = {dtype: overhead(dtype, args) for dtype in sorted({CASES[name].dtype for name in args.only})}
    heads = "plan | rank | weights + gradients + optimizer | activations | buffers | predicted MB | measured MB | error"
    more = " | without libraries MB | live tensors MB | error" if args.live else ""
    print(f"\n| {heads}{more} |")
    print("|---|---|---|---|---|---|---|---|" + ("---|---|---|" if args.live else ""))
    errors = [e for name in args.only for e in row(name, CASES[name], libraries, args)]
    if errors:
        mean = sum(errors) / len(errors)
        print(f"\n{len(errors)} ranks of at least 300 MB: mean {mean:.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
