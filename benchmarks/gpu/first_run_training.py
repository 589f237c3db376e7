"""Parts of first_run.py that train: run by it, one per process; each prints one JSON object."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from parts import emit

from hetero_megatron.comm import start_comm
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.data.batch import Batch
from hetero_megatron.monitoring.throughput import measured_peak_flops
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.memory.of_plan import estimate_memory
from hetero_megatron.platform import Platform, choose_platform
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec.flops import sequence_flops
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.kernels import rank_kernels
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.train import optimizer_factory

LR, CLIP, STEPS = 1e-3, 1.0, 20
LIMITS = {"fp32": 1e-3, "bf16": 3e-2}  # of a loss, relative: AdamW makes steps of rounding noise, 20 times
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = {  # hidden, layers, heads, KV heads, feed-forward, vocabulary, tokens per sequence, sequences per step
    "full": (2048, 16, 32, 8, 8192, 128256, 4096, 4),  # a Llama of 1.5e9 parameters
    "small": (64, 2, 4, 2, 192, 512, 32, 2),
}
PARITY = {"full": (512, 4, 8, 4, 1536, 4096, 512, 4), "small": (32, 2, 4, 2, 96, 128, 16, 2)}


def config_of(shape: tuple[int, ...]) -> dict[str, Any]:
    hidden, layers, heads, kv, ffn, vocab, length, _ = shape
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": length,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def platform_of(name: str | None) -> Platform:
    return choose_platform(load_plugins().platforms.values(), name, None, 0)


def plan_of(shape: tuple[int, ...]) -> Plan:
    length, batch = shape[-2:]
    pipeline = {
        "micro_batch_size": max(batch // 2, 1), "num_micro_batches": min(batch, 2),
        "stages": [{"ranks": [0], "layers": [0, shape[1]]}],
    }  # fmt: skip
    document = {"version": 1, "seq_length": length, "global_batch_size": batch, "pipelines": [pipeline]}
    return plan_from_dict(document, from_hf_config(config_of(shape)))


def build(
    platform: Platform, shape: tuple[int, ...], dtype: str, values: Callable[[str], torch.Tensor], graphs: bool = False
) -> Runtime:
    """Ours, with the platform's kernels; ``values``: by name of a tensor; ``graphs``: layers as device graphs."""
    spec, plan, kind = from_hf_config(config_of(shape)), plan_of(shape), DTYPES[dtype]
    comm = start_comm(platform, 300)
    if comm.accelerator is not None:
        comm.clock = DeviceClock(comm.accelerator)
    kernels = rank_kernels(plan, spec, 0, load_plugins().registry, platform, kind)
    factory = optimizer_factory(OptimizerConfig(), kernel=kernels.adamw)
    compiled = CompiledPlan(plan, spec)
    return Runtime(
        compiled, comm, kind, lambda t, box: values(t.name)[box.slices()], factory, kernels=kernels,
        options=RuntimeOptions(graphs_after=1 if graphs else None),
    )  # fmt: skip


def of_torch(platform: Platform) -> bool:
    """Whether torch itself knows the device: then its compiler and fused attention may."""
    return platform.accelerator is None or not platform.accelerator.adapter


def hf_model(shape: tuple[int, ...], dtype: torch.dtype, platform: Platform) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    attention = "sdpa" if of_torch(platform) else "eager"
    config = AutoConfig.for_model(**config_of(shape))
    with platform.device if of_torch(platform) else nullcontext():  # random numbers are made where they are used
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(platform.device)  # type: ignore[no-any-return]


def batches(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    """Of [b, s + 1] tokens each, from a distribution that can be learnt."""
    vocab, length, batch = shape[-3:]
    generator = torch.Generator().manual_seed(2)
    weights = torch.arange(1, vocab + 1).double().reciprocal()
    return [
        torch.multinomial(weights, batch * (length + 1), True, generator=generator).view(batch, length + 1)
        for _ in range(count)
    ]


def fetcher(tokens: torch.Tensor) -> Callable[[Any], Batch]:
    def fetch(indices: Any) -> Batch:
        rows = tokens[[i % len(tokens) for i in indices]]
        positions = torch.arange(rows.shape[1] - 1).expand(len(rows), -1).contiguous()
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions)

    return fetch


class Reference:
    """transformers' model with fp32 masters, torch's AdamW and clipping."""

    def __init__(self, model: torch.nn.Module, run: Callable[..., Any] | None = None) -> None:
        self.model, self.run = model, model if run is None else run
        self.params = list(model.parameters())
        copied = self.params[0].dtype != torch.float32
        self.masters = [p.detach().float().clone() for p in self.params] if copied else self.params
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)

    def step(self, tokens: torch.Tensor, micro_batches: int = 1) -> torch.Tensor:
        """The loss, before the update."""
        total = torch.zeros((), device=tokens.device)
        for rows in tokens.chunk(micro_batches):
            logits = self.run(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            (loss / micro_batches).backward()
            total += loss.detach() / micro_batches
        if self.masters is not self.params:
            for master, param in zip(self.masters, self.params, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.params:
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](self.params), list[torch.Tensor](self.masters))
        return total


def parity(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Losses of ``STEPS`` steps from the same weights on the same batches."""
    platform, shape = platform_of(options.platform), PARITY[options.size]
    data = batches(shape, 4)
    model = hf_model(shape, DTYPES[dtype], platform)
    values = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    reference = Reference(model)
    want = [float(reference.step(data[i % 4].to(platform.device))) for i in range(STEPS)]
    runtime, size = build(platform, shape, dtype, values.__getitem__), shape[-1]
    got = [runtime.train_step(fetcher(data[i % 4]), 0, size, LR, 0.0, CLIP).loss for i in range(STEPS)]
    errors = [abs(a / b - 1) for a, b in zip(got, want, strict=True)]
    limit = LIMITS[dtype]
    wrong = [] if max(errors) <= limit else [f"losses differ by {max(errors):.2e}, allowed are {limit:.0e}"]
    wrong += [] if got[-1] < got[0] else ["the loss does not fall"]
    return {"losses": got, "errors": errors, "limit": limit, "wrong": wrong}


def timed(platform: Platform, step: Callable[[], Any], seconds: float) -> float:
    """Median seconds of a step, the device waited for after each."""
    found: list[float] = []
    for _ in range(2):
        step()
    end = time.perf_counter() + seconds
    while len(found) < 3 or (time.perf_counter() < end and len(found) < 20):
        platform.synchronize()
        start = time.perf_counter()
        step()
        platform.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def result(options: argparse.Namespace, platform: Platform, side: str, seconds: float) -> dict[str, Any]:
    shape, dtype = SHAPES[options.size], "bf16"
    spec = from_hf_config(config_of(shape))
    length, batch = shape[-2:]
    peak = measured_peak_flops(platform, DTYPES[dtype])
    return {
        "side": side, "rate": batch * length / seconds, "step_ms": seconds * 1e3, "peak": platform.peak_memory(),
        "mfu": sequence_flops(spec, length) * batch / seconds / peak, "dtype": dtype,
        "model": f"Llama, hidden {shape[0]}, {shape[1]} layers, vocabulary {shape[5]:,}",
        "batch": f"{batch} sequences of {length:,} tokens per step",
    }  # fmt: skip


def ours(options: argparse.Namespace, graphs: bool = False) -> dict[str, Any]:
    """Speed, memory predicted and measured, and the operators of a step."""
    platform, shape = platform_of(options.platform), SHAPES[options.size]
    if graphs:
        missing = "no plugin knows it" if platform.accelerator is None else platform.accelerator.no_graphs()
        if missing:
            return {"left_out": f"{platform.name} captures no graphs: {missing}"}

    def values(name: str) -> torch.Tensor:
        shape_of = next(t.shape for t in tensors if t.name == name)
        made = torch.empty(shape_of, dtype=torch.bfloat16, device=platform.device)  # where they are used: seconds less
        return made.fill_(1.0) if "norm" in name else made.normal_(0.0, 0.02)

    from hetero_megatron.spec import logical_tensors

    tensors = logical_tensors(from_hf_config(config_of(shape)))
    before = 0 if platform.device.type != "cpu" else platform.peak_memory()
    runtime = build(platform, shape, "bf16", values, graphs)
    fetch, size = fetcher(batches(shape, 1)[0]), shape[-1]

    def step() -> None:
        runtime.train_step(fetch, 0, size, 1e-4, 0.01, CLIP)

    seconds = timed(platform, step, options.seconds / 4)
    found = result(options, platform, "ours, layers as device graphs" if graphs else "ours", seconds)
    found["measured"] = platform.peak_memory() - before
    found["predicted"] = estimate_memory(plan_of(shape), runtime.here.spec, "bf16", graphs=graphs)[0].total
    emit(found)
    return found | profiled(step, options.trace)


def profiled(step: Callable[[], None], trace: str | None) -> dict[str, Any]:
    """The ten kernels of a step that take most (operators, on a CPU), and how long the device was busy; the trace goes
    to a file."""
    from torch.autograd import DeviceType
    from torch.profiler import profile, supported_activities

    with profile(activities=supported_activities()) as profiler:
        step()
    if trace:
        profiler.export_chrome_trace(trace)
    rows = list(profiler.key_averages())
    on_device = [row for row in rows if row.device_type != DeviceType.CPU]

    def microseconds(row: Any) -> float:
        return float(row.self_device_time_total if on_device else row.self_cpu_time_total)

    found = sorted(on_device or rows, key=microseconds, reverse=True)
    busy = {"busy": sum(map(microseconds, on_device)) / 1e6} if on_device else {}
    return busy | {"operators": [(row.key, microseconds(row) / 1e3, row.count) for row in found[:10]]}


def peer(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """transformers, plain, compiled, or with Liger-Kernel."""
    platform, shape = platform_of(options.platform), SHAPES[options.size]
    if name == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return {"left_out": "Liger-Kernel is not installed"}
    if name != "transformers" and not of_torch(platform):
        return {"left_out": f"torch has no compiler for devices of the type {platform.device.type}"}
    if name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = hf_model(shape, torch.bfloat16, platform)
    reference = Reference(model, torch.compile(model) if name != "transformers" else None)
    tokens = batches(shape, 1)[0].to(platform.device)
    seconds = timed(platform, lambda: reference.step(tokens, min(len(tokens), 2)), options.seconds / 4)
    sides = {"transformers": "transformers", "compile": "transformers + torch.compile",
             "liger": "transformers + torch.compile + Liger-Kernel"}  # fmt: skip
    return result(options, platform, sides[name], seconds)


def about(options: argparse.Namespace) -> dict[str, Any]:
    from hetero_megatron.ops.conformance.speed import device_rates

    platform = platform_of(options.platform)
    bandwidth, flops = device_rates(platform.device, torch.bfloat16, platform.synchronize)
    return {
        "chip": platform.chip(), "platform": platform.name, "torch": torch.__version__, "bandwidth": bandwidth,
        "flops": flops, "dtype": "bf16",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--platform")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--trace")
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "about": lambda: about(options), "ours": lambda: ours(options), "graphs": lambda: ours(options, True),
        **{f"parity {d}": partial(parity, options, d) for d in DTYPES},
        **{name: partial(peer, options, name) for name in ("transformers", "compile", "liger")},
    }
    emit(parts[options.part]())


if __name__ == "__main__":
    main()
