"""Two symmetric data-parallel ranks against torch DDP + fused AdamW + clipping: time and peak memory per step.

    python benchmarks/bench_ddp.py [--rounds 2] [--steps 5] [--case llama-10M] [--keep-freed-memory] [--fully-sharded]

Two baselines: our own model under DDP (only the parallel part differs) and transformers' Llama under DDP.
Goal: time ratio (DDP / ours) >= 1. DDP runs with gradient_as_bucket_view, which spares it a copy of the gradients. With
--keep-freed-memory its processes have glibc keep what is freed, too, as ours do by themselves.

With --fully-sharded both divide their weights, gathered layer by layer: ours, and our own model under ``fully_shard``
(FSDP2, a layer per unit).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_one_rank import CASES, config
from benchmarks.common import alternate, import_lazily_loaded, machine, median, peak_rss, rank_env, ranks, timed

SIDES = ("transformers", "ddp", "ours")  # "ddp" is our GPTStage under DDP
SHARDED_SIDES = ("fsdp", "divided")  # the same under fully_shard, and ours with ``weights``


def report(step: Callable[[], object], steps: int, before: int) -> None:
    """Rank 0 prints its seconds and the larger of the ranks' memory."""
    import torch
    import torch.distributed as dist

    def together() -> None:
        dist.barrier()
        step()

    seconds = timed(together, steps)
    size = torch.tensor([peak_rss() - before], dtype=torch.int64)
    dist.all_reduce(size, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "bytes": int(size)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_ddp(case: str, steps: int, side: str, keep: bool = False) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoConfig, AutoModelForCausalLM

    from hetero_megatron.data.batch import Batch
    from hetero_megatron.model import GPTStage, initial_values
    from hetero_megatron.ops import cross_entropy as our_cross_entropy
    from hetero_megatron.platform.platform import keep_freed_memory
    from hetero_megatron.spec import shares as split
    from hetero_megatron.spec import stage_tensors, tensor_box
    from hetero_megatron.spec.hf_config import from_hf_config

    if keep:
        assert keep_freed_memory()
    dist.init_process_group("gloo")
    _, b, s = CASES[case]
    hf_config = AutoConfig.for_model(**config(case))
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, hf_config.vocab_size, (b, s + 1))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    import_lazily_loaded()
    before = peak_rss()
    transformers = side == "transformers"
    if transformers:
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    else:
        spec = from_hf_config(config(case))
        share = split(spec, (1,))[0]
        model = GPTStage(spec, share, range(spec.num_layers), embed=True, head=True)
        held = {t.name: t for t in stage_tensors(spec, range(spec.num_layers), True, True)}
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(initial_values(held[name], tensor_box(held[name], share), spec, 0))
    if side == "fsdp":
        for layer in model.layers():
            fully_shard(layer)
        parallel = fully_shard(model)
    else:
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = Batch(inputs, labels, torch.arange(s).expand(b, s))

    def step() -> None:
        if transformers:
            logits = parallel(input_ids=inputs, use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        else:
            loss = our_cross_entropy(parallel(inputs, batch), labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    report(step, steps, before)


def run_ours(case: str, steps: int, divided: bool = False) -> None:
    import torch

    from hetero_megatron.comm import start_comm
    from hetero_megatron.data.batch import Batch
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.platform import Platform
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.config import OptimizerConfig
    from hetero_megatron.training.runtime import Runtime
    from hetero_megatron.training.train import optimizer_factory

    _, b, s = CASES[case]
    spec = from_hf_config(config(case))
    pipelines = [
        {"micro_batch_size": b, "num_micro_batches": 1, "stages": [{"ranks": [r], "layers": [0, spec.num_layers]}]}
        for r in (0, 1)
    ]
    if divided:
        one = {"ranks": [0, 1], "layers": [0, spec.num_layers], "weights": {"gather": "layer"}}
        pipelines = [{"micro_batch_size": 2 * b, "num_micro_batches": 1, "stages": [one]}]
    plan = plan_from_dict({"seq_length": s, "global_batch_size": 2 * b, "pipelines": pipelines}, spec)
    torch.manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(0, spec.vocab_size, (b, s + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(s).expand(b, s))
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 60)
    import_lazily_loaded()
    before = peak_rss()
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    runtime = Runtime(
        compiled,
        comm,
        torch.float32,
        lambda t, box: initial_values(t, box, spec, 0),
        optimizer_factory(OptimizerConfig()),
    )
    report(lambda: runtime.train_step(lambda _: batch, 0, 2 * b, 1e-4, 0.01, 1.0), steps, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--side", choices=(*SIDES, *SHARDED_SIDES))
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--keep-freed-memory", action="store_true", help="also for DDP")
    parser.add_argument("--fully-sharded", action="store_true", help="against FSDP2 instead of DDP")
    args = parser.parse_args()
    if args.side in ("ours", "divided"):
        run_ours(args.case, args.steps, args.side == "divided")
        return
    if args.side:
        run_ddp(args.case, args.steps, args.side, args.keep_freed_memory)
        return
    names = SHARDED_SIDES if args.fully_sharded else SIDES
    labels = {"ddp": "our model, DDP", "transformers": "transformers, DDP", "fsdp": "our model, FSDP2"}
    ours = names[-1]
    print(
        f"{machine()}; 2 ranks over gloo, 1 thread each, fp32, AdamW fused, clip 1.0, "
        f"{args.rounds} rounds of {args.steps} steps"
    )
    print(
        f"{'case':<12}{'baseline':<22}{'torch ms':>9}{'ours ms':>9}{'time ratio':>12}"
        f"{'torch MiB':>10}{'ours MiB':>10}{'mem ratio':>11}"
    )
    for case in [args.case] if args.case else CASES:
        more = ["--steps", str(args.steps), *(["--keep-freed-memory"] if args.keep_freed_memory else [])]
        sides = {s: ranks(2, __file__, "--side", s, "--case", case, *more) for s in names}
        results = alternate(sides, args.rounds, rank_env())
        time = {s: median([x for r in results[s] for x in r["seconds"]]) * 1e3 for s in names}
        size = {s: median([r["bytes"] for r in results[s]]) / 2**20 for s in names}
        for side, label in ((side, label) for side, label in labels.items() if side in names):
            print(
                f"{case:<12}{label:<22}{time[side]:>9.1f}{time[ours]:>9.1f}{time[side] / time[ours]:>12.3f}"
                f"{size[side]:>10.0f}{size[ours]:>10.0f}{size[ours] / size[side]:>11.3f}", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
