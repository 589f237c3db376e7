"""Ring and all-to-all attention beside torch's context_parallel and DeepSpeed's Ulysses, on equal chips (CPU, gloo).

    python benchmarks/bench_context_peers.py [--ranks 2] [--tokens 4096] [--rounds 9]

One attention, forward and backward, on the same tensors in fp32 (float64 for the reference): sides take turns in the
same processes, and medians of the slowest rank are compared. Every side's output and gradients must agree with
attention in one process. torch's public ``context_parallel`` knows CUDA's kernels only; what it says on a CPU is
printed, and its ring loop is run with the CPU's kernel put in.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, median, rank_env, ranks

HEADS, HEAD_DIM = 8, 32
AGREE = 1e-5  # largest error of output and gradients, relative to the largest value
PAIRS = (
    ("ring", "torch ring, alltoall"), ("ring", "torch ring, allgather"), ("gather", "torch ring, allgather"),
    ("all-to-all", "DeepSpeed Ulysses"),
)  # fmt: skip


def our_attention(comm: Any, count: int, length: int, kind: str) -> tuple[Callable[..., Any], list[tuple[int, int]]]:
    """This runtime's attention with equal shares, and the tokens of this rank."""
    from hetero_megatron.model.layers import Context
    from hetero_megatron.parallel.context import ContextAttention, StageAttention
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.context_plan import context_groups, stage_contexts
    from hetero_megatron.spec.hf_config import from_hf_config

    spec = from_hf_config({
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": length,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
    })  # fmt: skip
    members, own = list(range(count)), length // count
    if kind == "all-to-all":
        groups: list[dict[str, Any]] = [{"ranks": members, "tokens": [own] * count, "heads": [HEADS // count] * count}]
    else:
        groups = [{"ranks": [r], "tokens": [own], "heads": [HEADS]} for r in members]
    stage: dict[str, Any] = {"ranks": members, "layers": [0, 1], "context": groups}
    if kind != "all-to-all":
        stage["kv"] = {"transport": kind}
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [stage]}
    plan = plan_from_dict({"seq_length": length, "global_batch_size": 1, "pipelines": [pipeline]}, spec)
    built = plan.pipelines[0].stages[0]
    comm.create_groups([plan.ranks, *context_groups(spec, built)])
    (context,) = stage_contexts(spec, built, length)
    module = ContextAttention(StageAttention(context, comm, None))
    return (lambda q, k, v: module(q, k, v, None, Context(None, {}))), list(context.member(comm.rank).tokens)


def one_rank(length: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks import context_peers as peers
    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.platform import Platform

    torch.set_num_threads(1)
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 600)
    world = dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, length, HEADS, HEAD_DIM) for _ in range(4)]
    want = reference(whole)
    sides: dict[str, tuple[Any, list[tuple[int, int]]]] = {
        kind: our_attention(comm, world, length, kind) for kind in ("ring", "gather", "all-to-all")
    }
    group, places = dist.group.WORLD, peers.torch_places(comm.rank, world, length)
    for method in ("alltoall", "allgather"):
        sides[f"torch ring, {method}"] = (peers.torch_ring_attention(group, method), places)
    own = length // world
    sides["DeepSpeed Ulysses"] = (peers.deepspeed_ulysses(group), [(comm.rank * own, (comm.rank + 1) * own)])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    errors = dict.fromkeys(sides, 0.0)
    everyone = comm.group(range(world))
    for _ in range(rounds + 1):
        for name, (attention, tokens) in sides.items():
            q, k, v, grad = (torch.cat([x[:, a:b] for a, b in tokens], 1) for x in whole)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            everyone.gather_vectors(torch.zeros(1))
            start = time.perf_counter()
            out = attention(*leaves)
            out.backward(grad)
            seconds[name].append(time.perf_counter() - start)
            for got, full in zip((out, *(x.grad for x in leaves)), want, strict=True):
                mine = torch.cat([full[:, a:b] for a, b in tokens], 1)
                assert got is not None
                errors[name] = max(errors[name], float((got.detach().double() - mine).abs().max() / mine.abs().max()))
    said = peers.public_api(init_device_mesh("cpu", (world,)), *whole[:3])
    every: Any = everyone.gather_objects((seconds, errors))
    if comm.rank == 0:
        slowest = {n: [max(s[n][i] for s, _ in every) for i in range(1, rounds + 1)] for n in sides}
        worst = {n: max(e[n] for _, e in every) for n in sides}
        print(json.dumps({"seconds": slowest, "errors": worst, "public": said}), flush=True)
    stop_comm()


def reference(whole: list[Any]) -> list[Any]:
    """Output and gradients of attention in one process, in float64."""
    from benchmarks import context_peers as peers

    leaves = [x.double().requires_grad_() for x in whole[:3]]
    out = peers.causal(*leaves)
    out.backward(whole[3].double())
    return [out.detach(), *(x.grad for x in leaves)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        one_rank(options.tokens, options.rounds)
        return
    print(f"{machine()}: one attention of {HEADS} heads of {HEAD_DIM}, {options.tokens} tokens, fp32, "
          "forward + backward")  # fmt: skip
    for count in options.ranks:
        words = ["--as-rank", "--tokens", str(options.tokens), "--rounds", str(options.rounds)]
        found = alternate({"all": ranks(count, __file__, *words)}, 1, rank_env())["all"][0]
        print(f"\n### {count} ranks\n\n| side | median s | least s | largest error |\n|---|---|---|---|")
        for name, seconds in found["seconds"].items():
            print(f"| {name} | {median(seconds):.3f} | {min(seconds):.3f} | {found['errors'][name]:.1e} |")
            if found["errors"][name] > AGREE:
                raise SystemExit(f"{name} does not agree with attention in one process: {found['errors'][name]}")
        print()
        for ours, theirs in PAIRS:
            mine, other = found["seconds"][ours], found["seconds"][theirs]
            rounds = [b / a for a, b in zip(mine, other, strict=True)]
            print(f"{theirs} / our {ours}: {median(other) / median(mine):.3f}x (median of the rounds' ratios "
                  f"{median(rounds):.3f}x)")  # fmt: skip
        print(f"torch's public context_parallel on a CPU: {found['public'] or 'runs'}", flush=True)


if __name__ == "__main__":
    main()
