"""Share of transfer time hidden behind compute on a slow link: pipeline transfers, sums of gradients, and parameters.

    python benchmarks/bench_overlap.py [--rounds 5] [--rate "100 MB/s"] [--only parameters]

Two nodes of the testbed, one rank each at its core's own speed, with a shaped link between them.
Pipeline: two stages, 1F1B. ``without`` runs the same schedule and the same compute with messages of one element,
so both step times contain the same bubble; ``alone`` is the same messages back to back, nothing else running. Of ``m``
activations and ``m`` gradients the first activation and the last gradient have nothing to hide behind: ``possible``.
Gradients: two data-parallel ranks; ``with`` sends buckets during the last backward, ``after`` when it is over.

Parameters: the same two ranks, steps one after the other; ``with`` lets parameters come beside the next forward,
``after`` waits for them at the end of the step. Of ``STEPS`` steps all but the last one can hide them: ``possible``.

    hidden = 1 - (with - without) / alone        hidden = (after - with) / alone

The modes alternate step by step in one run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, median
from benchmarks.testbed_run import emulated_cluster

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
MICRO_BATCH, MICRO_BATCHES, SEQ = 4, 8, 256  # 4 MiB per message
STEPS = 4  # of parameters


def make_runtime(
    pipelines: list[dict[str, Any]], samples: int, optimizer: Any = None
) -> tuple[Any, Callable[[], Any]]:
    """(runtime on 2 ranks, a function that makes the step's work)."""
    import torch

    from hetero_megatron.comm import start_comm
    from hetero_megatron.data.batch import Batch
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.platform import Platform
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.runtime import Runtime

    spec = from_hf_config(MODEL)
    plan = plan_from_dict({"seq_length": SEQ, "global_batch_size": samples, "pipelines": pipelines}, spec)
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 60)
    torch.manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (MICRO_BATCH, SEQ + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.arange(SEQ).expand(MICRO_BATCH, SEQ))
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    runtime: Any = Runtime(compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, 0), optimizer)
    runtime.fetch = lambda _: batch
    return runtime, lambda: runtime.work(runtime.fetch, 0, samples)


def together(runtime: Any, call: Callable[[], object]) -> float:
    """Seconds until the slower of the ranks is done, all having started together."""
    import torch

    runtime.world.gather_vectors(torch.zeros(1))
    start = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(runtime.world.gather_vectors(seconds).max())


class EmptyBoundary:
    """Stands in for a Boundary: same messages, order and waits, one element each."""

    def __init__(self, comm: Any, peer: int, shape: tuple[int, ...]) -> None:
        import torch

        self.comm, self.peer = comm, peer
        self.value, self.one = torch.randn(shape), torch.zeros(1)

    def send(self, x: Any, backward: bool, tag: int) -> list[Any]:
        return [self.comm.isend(self.one, self.peer, tag)]

    def receive(self, backward: bool, tag: int, dtype: Any) -> EmptyReceive:
        return EmptyReceive(self.comm.irecv(self.one.clone(), self.peer, tag), self.value)


class EmptyReceive:
    def __init__(self, handle: Any, value: Any) -> None:
        self.handle, self.value = handle, value

    def wait(self) -> Any:
        self.handle.wait()
        return self.value.detach()  # a new leaf on the same memory


def run_pipeline(rounds: int) -> None:
    import torch

    stages = [{"ranks": [0], "layers": [0, 1]}, {"ranks": [1], "layers": [1, 2]}]
    pipeline = {"micro_batch_size": MICRO_BATCH, "num_micro_batches": MICRO_BATCHES, "stages": stages}
    runtime, work = make_runtime([pipeline], MICRO_BATCH * MICRO_BATCHES)
    executor, me = runtime.executor, runtime.comm.rank
    empty = EmptyBoundary(runtime.comm, 1 - me, (MICRO_BATCH, SEQ, MODEL["hidden_size"]))
    step_work = work()
    x = torch.randn(MICRO_BATCH, SEQ, MODEL["hidden_size"])
    (real,) = executor.chunks
    side = "before" if me else "after"
    without = replace(real, **{side: lambda size: empty})

    def step(chunk: Any) -> Callable[[], None]:
        def run() -> None:
            executor.chunks = [chunk]
            executor.run(step_work)

        return run

    def alone() -> None:
        boundary = getattr(real, side)(MICRO_BATCH)
        for backward in (False, True):
            for i in range(MICRO_BATCHES):
                if me == int(backward):
                    for handle in boundary.send(x, backward, 2 * i + backward):
                        handle.wait()
                else:
                    boundary.receive(backward, 2 * i + backward, torch.float32).wait()

    measure(runtime, {"with": step(real), "without": step(without), "alone": alone}, rounds)


REPLICAS: list[dict[str, Any]] = [
    {"micro_batch_size": MICRO_BATCH, "num_micro_batches": 1, "stages": [{"ranks": [r], "layers": [0, 2]}]}
    for r in (0, 1)
]


def run_gradients(rounds: int) -> None:
    runtime, work = make_runtime(REPLICAS, 2 * MICRO_BATCH)
    step_work, sync = work(), runtime.sync

    def step(reducer: Any) -> Callable[[], None]:
        def run() -> None:
            runtime.executor.run(step_work, reducer)
            sync.finish()

        return run

    def alone() -> None:  # all gradients are zeros, and are packed, exchanged and added as usual
        sync.finish()

    modes = {"with": step(sync), "after": step(None), "alone": alone}
    measure(runtime, modes, rounds, lambda: [sync.sums.sum(n) for n in sync.params])


def run_parameters(rounds: int) -> None:
    from hetero_megatron.training.config import OptimizerConfig
    from hetero_megatron.training.train import optimizer_factory

    runtime, _ = make_runtime(REPLICAS, 2 * MICRO_BATCH, optimizer_factory(OptimizerConfig()))

    def steps(ahead: bool) -> None:
        for i in range(STEPS):
            runtime.train_step(runtime.fetch, 0, 2 * MICRO_BATCH, 1e-5, ahead=ahead and i + 1 < STEPS)

    def alone() -> None:
        for _ in range(STEPS):
            runtime.optimizer.all_gather(True)

    measure(runtime, {"with": lambda: steps(True), "after": lambda: steps(False), "alone": alone}, rounds)


def measure(
    runtime: Any, modes: dict[str, Callable[[], None]], rounds: int, prepare: Callable[[], object] = lambda: None
) -> None:
    """Alternate the modes; ``prepare`` comes, untimed, before ``alone``, and what it leaves is cleared after."""
    import torch

    from hetero_megatron.comm import stop_comm

    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for i in range(rounds + 1):
        for name, call in modes.items():
            if name == "alone":
                prepare()
            taken = together(runtime, call)
            if i:  # the first round warms up
                seconds[name].append(taken)
    if runtime.comm.rank == 0:
        print(json.dumps(seconds), flush=True)
    runtime.world.gather_vectors(torch.zeros(1))
    stop_comm()


def on_testbed(folder: Path, rate: str, *arguments: str) -> list[str]:
    """A command for ``alternate`` that runs this file on the two ranks of a testbed."""
    cluster = folder / "cluster.json"
    cluster.write_text(json.dumps(emulated_cluster([("node", 2, 1, 0.8, "4 GiB")], rate)))
    launch = ["-m", "hetero_megatron.cli.main", "testbed", "run", "--chips", "none", "--cluster", str(cluster), "--"]
    return [*launch, sys.executable, __file__, *arguments]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="100 MB/s", help="of the link, each way")
    parser.add_argument("--side", choices=list(SIDES), help="of a rank of the testbed")
    parser.add_argument("--only", choices=list(SIDES), help="measure this alone")
    args = parser.parse_args()
    if args.side:
        SIDES[args.side](args.rounds)
        return
    print(f"{machine()}; 2 ranks, gloo at {args.rate}, 1 thread each, fp32, {args.rounds} rounds, modes alternate")
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            side: on_testbed(Path(folder), args.rate, "--side", side, "--rounds", str(args.rounds))
            for side in ([args.only] if args.only else SIDES)
        }
        results = alternate(sides, 1, timeout=400)
    ms = {side: {k: median(v) * 1e3 for k, v in runs[0].items()} for side, runs in results.items()}
    print(f"{'what':<12}{'with ms':>10}{'compared':>20}{'alone ms':>10}{'hidden':>9}{'possible':>10}")
    shares = {"pipeline": f"{1 - 1 / MICRO_BATCHES:.0%}", "gradients": "-", "parameters": f"{1 - 1 / STEPS:.0%}"}
    for side in ms:
        possible = shares[side]
        other = "without" if side == "pipeline" else "after"
        mine, against, alone = ms[side]["with"], ms[side][other], ms[side]["alone"]
        hidden = 1 - (mine - against) / alone if side == "pipeline" else (against - mine) / alone
        print(f"{side:<12}{mine:>10.1f}{other:>10}{against:>10.1f}{alone:>10.1f}{hidden:>9.0%}{possible:>10}")


SIDES = {"pipeline": run_pipeline, "gradients": run_gradients, "parameters": run_parameters}

if __name__ == "__main__":
    main()
