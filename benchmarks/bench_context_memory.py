"""Peak memory of one context-parallel attention, forward and backward, against sequence length: ring and gathered.

    python benchmarks/bench_context_memory.py [--own 2048] [--block 512]

First the sequence grows with the ranks (the own shard stays): the ring's peak must stay, gathering grows. Then the
own shard grows on two ranks: both are linear. ``tensors`` is the peak of live tensors, counted operator by operator;
``resident`` what the process grew by, which also holds the transport's and the allocator's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, peak_rss, rank_env, ranks

HEADS, HEAD_DIM = 4, 32
MIB = 1 << 20


def one_rank(count: int, own: int, block: int, transport: str) -> None:
    import torch

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.dry_run.allocator import MemoryTracker
    from hetero_megatron.model.layers import Context
    from hetero_megatron.parallel.context import ContextAttention, StageAttention
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.context_plan import context_groups, stage_contexts
    from hetero_megatron.platform import Platform
    from hetero_megatron.spec.hf_config import from_hf_config

    length = own * count
    spec = from_hf_config({
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": length,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False,
    })  # fmt: skip
    groups = [{"ranks": [r], "tokens": [own], "heads": [HEADS]} for r in range(count)]
    stage = {"ranks": list(range(count)), "layers": [0, 1], "context": groups}
    stage["kv"] = {"transport": transport, "block": block}
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [stage]}
    plan = plan_from_dict({"seq_length": length, "global_batch_size": 1, "pipelines": [pipeline]}, spec)
    built = plan.pipelines[0].stages[0]
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 600)
    comm.create_groups([plan.ranks, *context_groups(spec, built)])
    (context,) = stage_contexts(spec, built, length)
    shared = StageAttention(context, comm, None)
    world = comm.group(plan.ranks)
    world.gather_vectors(torch.zeros(1))  # connections are made, and their memory is not counted
    torch.manual_seed(comm.rank)
    before = peak_rss()
    with MemoryTracker() as memory:
        q, k, v = (torch.randn(1, own, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
        ContextAttention(shared)(q, k, v, None, Context(None, {})).sum().backward()
    numbers = world.gather_vectors(torch.tensor([memory.peak, peak_rss() - before], dtype=torch.float64))
    if comm.rank == 0:
        print(json.dumps({"tensors": numbers[:, 0].max().item() / MIB, "resident": numbers[:, 1].max().item() / MIB}))
    stop_comm()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", type=int, default=2048, help="tokens per rank while the ranks grow")
    parser.add_argument("--block", type=int, default=512, help="tokens per block of keys and values")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.as_rank:
        one_rank(int(options.as_rank[0]), options.own, options.block, options.as_rank[1])
        return
    print(f"{machine()}: {HEADS} heads of {HEAD_DIM}, fp32, blocks of {options.block}")
    print(f"{'ranks':>5} {'own tokens':>10} {'sequence':>9}   {'ring: tensors':>13} {'resident':>9}   "
          f"{'gathered: tensors':>17} {'resident':>9}   MiB")  # fmt: skip
    found = []
    cases = [(count, options.own) for count in (2, 4, 8)] + [(2, options.own * n) for n in (2, 4)]
    for count, own in cases:
        words = ["--own", str(own), "--block", str(options.block), "--as-rank", str(count)]
        sides = {t: ranks(count, __file__, *words, t) for t in ("ring", "gather")}
        got = {t: rows[0] for t, rows in alternate(sides, 1, rank_env()).items()}
        found.append({"ranks": count, "own": own, "sequence": count * own, **got})
        print(f"{count:>5} {own:>10,} {count * own:>9,}   {got['ring']['tensors']:>13.1f} "
              f"{got['ring']['resident']:>9.1f}   {got['gather']['tensors']:>17.1f} {got['gather']['resident']:>9.1f}",
              flush=True)  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
