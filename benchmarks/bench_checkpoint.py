"""Checkpoints: bandwidth against plain torch DCP on the same tensors, training stall, import against transformers.

    python benchmarks/bench_checkpoint.py [--rounds 3] [--layers 8] [--directory DIR]

Two ranks, each owning half of a Llama's masters and moments. Plain DCP writes them with its FileSystemWriter (pickled
metadata, no checksums); ours adds a sha256 of every byte on the way and verifies it on load. The stall is what the
training thread waits: in ``save``, and before the next optimizer step for a copy that is not done yet. Goal: under 5 %
of a step once the buffers exist (a step here is short: few tokens).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, median, rank_env, ranks

HIDDEN, VOCAB, SEQUENCE = 512, 8192, 512


def config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": 1408,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": VOCAB, "max_position_embeddings": SEQUENCE,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip


def runtime_of_two(layers: int) -> tuple[Any, Any, Callable[[], Any]]:
    """(runtime after one step, its spec, a step)."""
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

    spec = from_hf_config(config(layers))
    stages = [{"ranks": [0, 1], "layers": [0, layers], "tp": 2}]
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": stages}]
    plan = plan_from_dict({"seq_length": SEQUENCE, "global_batch_size": 2, "pipelines": pipelines}, spec)
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 600)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (1, SEQUENCE + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(SEQUENCE).expand(1, SEQUENCE))
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0),
        optimizer_factory(OptimizerConfig()),
    )  # fmt: skip

    def step() -> None:
        runtime.train_step(lambda _: batch, 0, 2, 1e-4)

    step()
    return runtime, spec, step


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def seconds(action: Callable[[], Any], runtime: Any) -> float:
    """Of the slowest rank."""
    import torch

    runtime.world.gather_objects(None)
    start = time.perf_counter()
    action()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(runtime.world.gather_vectors(taken).max())


def run_side(side: str, layers: int, directory: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from hetero_megatron.checkpoint.native import CheckpointSaver, open_checkpoint
    from hetero_megatron.checkpoint.state import load_tensors, merge_numbers, owned_tensors
    from hetero_megatron.comm import stop_comm

    runtime, spec, step = runtime_of_two(layers)
    tensors, numbers = owned_tensors(runtime.optimizer, spec)
    size = sum(v.nbytes for t in tensors.values() for _, v in t.parts.values())
    total = int(runtime.world.gather_vectors(torch.tensor([float(size)])).sum())
    result: dict[str, float] = {"bytes": total}
    path = Path(directory) / side
    if runtime.comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
    if side == "dcp":
        flat = {f"{n}@{o}": v.detach() for n, t in tensors.items() for o, (_, v) in t.parts.items()}
        result["save"] = seconds(lambda: dcp.save(flat, checkpoint_id=str(path)), runtime)
        result["load"] = seconds(lambda: dcp.load(flat, checkpoint_id=str(path)), runtime)
    else:
        group = runtime.comm.background_group(runtime.here.plan.ranks)
        saver = CheckpointSaver(str(path), group, keep=2)
        runtime.hooks.before_update = lambda: result.__setitem__("waited", seconds_of(saver.staged))
        merge = lambda known: {"optimizer": {"numbers": merge_numbers(known)}}  # noqa: E731

        def save(number: int) -> None:
            saver.save(number, tensors, {"step": number}, numbers, merge)

        def saved(number: int) -> Callable[[], None]:
            def to_the_end() -> None:
                save(number)
                saver.wait()

            return to_the_end

        result["save"] = seconds(saved(1), runtime)  # buffers are made
        result["save"] = seconds(saved(2), runtime)
        with_save, without = list[tuple[float, ...]](), list[tuple[float, float]]()
        for number in range(3, 6):  # a step after save() returns, while the copy is made and written
            before = time.thread_time()
            stall = seconds(partial(save, number), runtime)
            cpu = time.thread_time() - before
            whole, step_cpu = seconds(step, runtime), time.thread_time() - before - cpu
            with_save.append((stall + result["waited"], cpu, stall + whole, cpu + step_cpu))
            saver.wait()
            before = time.thread_time()
            without.append((seconds(step, runtime), time.thread_time() - before))
        result["step"], result["step cpu"] = (median(list(column)) for column in zip(*without))
        for key, column in zip(("stall", "stall cpu", "with save", "with save cpu"), zip(*with_save), strict=True):
            result[key] = median(list(column))

        def load() -> None:
            found = open_checkpoint(str(path), runtime.world)
            assert found is not None
            load_tensors(found, runtime.optimizer, spec, runtime.world, True)

        result["load"] = seconds(load, runtime)
    if runtime.comm.rank == 0:
        print(json.dumps(result), flush=True)
    stop_comm()


def run_import(side: str, layers: int, directory: str) -> None:
    """Seconds from a Hugging Face directory to a model in memory, in one process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Path(directory) / "hf"
    if not source.exists():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(layers))).save_pretrained(source)
    if side == "transformers":
        import transformers.models.llama.modeling_llama  # noqa: F401  not to be timed

        start = time.perf_counter()
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        from hetero_megatron.checkpoint.hf_load import HFWeights
        from hetero_megatron.model import GPTStage
        from hetero_megatron.spec import load_model, shares, stage_tensors, tensor_box

        start = time.perf_counter()
        spec = load_model(str(source))
        share, weights = shares(spec, (1,))[0], HFWeights(str(source), spec)
        model = GPTStage(spec, share, range(spec.num_layers), embed=True, head=True)
        held = {t.name: t for t in stage_tensors(spec, range(spec.num_layers), True, True)}
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights.read(held[name], tensor_box(held[name], share)))
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--directory")
    parser.add_argument("--side", choices=("dcp", "native", "transformers", "import"))
    args = parser.parse_args()
    if args.side in ("dcp", "native"):
        return run_side(args.side, args.layers, args.directory)
    if args.side:
        return run_import(args.side, args.layers, args.directory)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        measure(args.rounds, args.layers, directory)


def measure(rounds: int, layers: int, directory: str) -> None:
    more = ["--layers", str(layers), "--directory", directory]
    two = {s: ranks(2, __file__, "--side", s, *more) for s in ("dcp", "native")}
    found = alternate(two, rounds, rank_env())
    middle = {s: {k: median([r[k] for r in rows]) for k in rows[0]} for s, rows in found.items()}
    plain, ours = middle["dcp"], middle["native"]
    gigabytes = ours["bytes"] / 1e9
    print(f"{machine()}; 2 ranks, {gigabytes:.2f} GB of masters and moments, median of {rounds} rounds")
    for what in ("save", "load"):
        rates = [gigabytes / side[what] for side in (plain, ours)]
        print(f"{what}: plain DCP {rates[0]:.2f} GB/s, ours {rates[1]:.2f} GB/s, ratio {rates[1] / rates[0]:.2f}")
    print(
        f"stall of an asynchronous save: {1e3 * ours['stall']:.1f} ms, {ours['stall'] / ours['step']:.2%} of a step of "
        f"{1e3 * ours['step']:.0f} ms (CPU time of the training thread: {1e3 * ours['stall cpu']:.1f} ms, "
        f"{ours['stall cpu'] / ours['step cpu']:.2%}); a step beside the copy and the writing takes "
        f"{ours['with save'] / ours['step']:.2f} of one alone "
        f"({ours['with save cpu'] / ours['step cpu']:.2f} by CPU time)"
    )
    one = {s: [__file__, "--side", s, *more] for s in ("transformers", "import")}
    alternate(one, 1, rank_env())  # makes the directory, and warms the page cache
    speed = {s: median([r["seconds"] for r in rows]) for s, rows in alternate(one, rounds, rank_env()).items()}
    ratio = speed["transformers"] / speed["import"]
    print(f"import: from_pretrained {speed['transformers']:.2f} s, ours {speed['import']:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
