"""One rank against transformers + torch AdamW: same model, batch, threads and clipping; time and peak memory per step.

    python benchmarks/bench_one_rank.py [--rounds 2] [--steps 5] [--case llama-10M]

Goal: time ratio (transformers / ours) >= 1, memory ratio (ours / transformers) <= 1. On a machine that does other work
the ratio of CPU seconds says more, with OMP_NUM_THREADS=1: threads that wait for each other count, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, import_lazily_loaded, machine, median, peak_rss, timed_with_cpu

# name: (Hugging Face config, sequences, tokens per sequence)
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama-10M": (
        {
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 704,
            "vocab_size": 8192,
        },
        4,
        256,
    ),
    "llama-50M": (
        {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 1408,
            "vocab_size": 32000,
        },
        2,
        256,
    ),
    "mixtral-30M": (
        {
            "model_type": "mixtral",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 512,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 8192,
        },
        4,
        256,
    ),
    "qwen3-moe-30M": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 8192,
        },
        4,
        256,
    ),
    "qwen3-next-30M": (  # three layers of Gated DeltaNet for each one of attention
        {
            "model_type": "qwen3_next",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "vocab_size": 8192,
        },
        4,
        512,
    ),
    "kimi-linear-20M": (  # three layers of Kimi Delta Attention for each one of latent attention
        {
            "model_type": "kimi_linear",
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "vocab_size": 8192,
            "pad_token_id": 0,
        },
        2,
        256,
    ),
    "granite-4-h-20M": (  # seven layers of Mamba-2 and one of attention
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_local_experts": 0,
            "shared_intermediate_size": 768,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "vocab_size": 8192,
        },
        4,
        512,
    ),
}


def config(case: str) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        **CASES[case][0],
    }


def run_transformers(case: str, steps: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _, b, s = CASES[case]
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**config(case))
    import_lazily_loaded()
    before = peak_rss()
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, hf_config.vocab_size, (b, s + 1))

    def step() -> None:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds, cpu = timed_with_cpu(step, steps)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": peak_rss() - before}))


def run_ours(case: str, steps: int) -> None:
    import torch

    from hetero_megatron.comm import start_comm
    from hetero_megatron.data.batch import Batch
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.platform import detect_platform
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.config import OptimizerConfig
    from hetero_megatron.training.kernels import rank_kernels
    from hetero_megatron.training.runtime import Runtime
    from hetero_megatron.training.train import optimizer_factory

    _, b, s = CASES[case]
    spec = from_hf_config(config(case))
    plan = plan_from_dict(
        {
            "seq_length": s,
            "global_batch_size": b,
            "pipelines": [
                {
                    "micro_batch_size": b,
                    "num_micro_batches": 1,
                    "stages": [{"ranks": [0], "layers": [0, spec.num_layers]}],
                }
            ],
        },
        spec,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (b, s + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(s).expand(b, s))
    platform = detect_platform("gloo")
    comm = start_comm(platform, 60)
    kernels = rank_kernels(plan, spec, 0, load_plugins().registry, platform, torch.float32)
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
        kernels,
    )
    seconds, cpu = timed_with_cpu(lambda: runtime.train_step(lambda _: batch, 0, b, 1e-4, 0.01, 1.0), steps)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "bytes": peak_rss() - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--side", choices=["transformers", "ours"])
    parser.add_argument("--case", choices=list(CASES))
    args = parser.parse_args()
    if args.side:
        {"transformers": run_transformers, "ours": run_ours}[args.side](args.case, args.steps)
        return
    print(f"{machine()}; fp32, AdamW fused, clip 1.0, {args.rounds} rounds of {args.steps} steps, sides alternate")
    print(
        f"{'case':<12}{'transformers ms':>16}{'ours ms':>10}{'time ratio':>12}"
        f"{'CPU ratio':>11}{'theirs MiB':>12}{'ours MiB':>10}{'mem ratio':>11}"
    )
    for case in [args.case] if args.case else CASES:
        sides = {
            s: [__file__, "--side", s, "--case", case, "--steps", str(args.steps)] for s in ("transformers", "ours")
        }
        results = alternate(sides, args.rounds)
        time = {s: median([x for r in results[s] for x in r["seconds"]]) * 1e3 for s in sides}
        cpu = {s: median([x for r in results[s] for x in r["cpu"]]) for s in sides}
        size = {s: median([r["bytes"] for r in results[s]]) / 2**20 for s in sides}
        print(
            f"{case:<12}{time['transformers']:>16.1f}{time['ours']:>10.1f}{time['transformers'] / time['ours']:>12.3f}"
            f"{cpu['transformers'] / cpu['ours']:>11.3f}"
            f"{size['transformers']:>12.0f}{size['ours']:>10.0f}{size['ours'] / size['transformers']:>11.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
