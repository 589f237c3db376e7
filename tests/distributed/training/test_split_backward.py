"""Backward split into B_INPUT and W, and chunks: when gradients leave, 16 bits with a loss scale, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.cli.configure import configure
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
from hetero_megatron.plans import Plan, dump_yaml, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.train import optimizer_factory
from tests.support.parity import Case, RandomSamples
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

STEPS = 2


def train(
    comm: Comm, chosen: Plan, spec: ModelSpec, dtype: torch.dtype, scale: float
) -> tuple[list[float], list[float], dict[str, Any], list[str]]:
    """(losses, norms, weights of this rank, in which actions a bucket left in the last step)."""
    compiled = CompiledPlan(chosen, spec, bucket_bytes=1 << 12)
    comm.create_groups(compiled.groups)
    if comm.rank not in chosen.ranks:
        return [], [], {}, []
    runtime = Runtime(
        compiled, comm, dtype, lambda t, box: initial_values(t, box, spec, 7), optimizer_factory(OptimizerConfig())
    )
    data = RandomSamples(Case(3, len(chosen.ranks), {}, {"seq_length": chosen.seq_length}), spec.vocab_size)
    left: list[str] = []
    start = BucketExchange.start_reduce

    def watched(self: BucketExchange, *args: Any) -> Any:
        left.append(comm.activity)
        return start(self, *args)

    BucketExchange.start_reduce = watched  # type: ignore[method-assign]
    try:
        stats = []
        for _ in range(STEPS):
            left.clear()
            size = chosen.global_batch_size
            stats.append(runtime.train_step(data.fetch, 0, size, 1e-3, 0.1, 1.0, loss_scale=scale))
    finally:
        BucketExchange.start_reduce = start  # type: ignore[method-assign]
    weights = {n: p.detach().float().numpy().copy() for n, p in runtime.sync.params.items()}
    return [s.loss for s in stats], [s.grad_norm for s in stats], weights, [a.split("action ")[-1] for a in left]


def model(**more: Any) -> ModelSpec:
    return from_hf_config(LLAMA | {"num_hidden_layers": 4} | more)


def two(schedule: str, *stages: list[Any]) -> dict[str, Any]:
    """A pipeline of two stages, and a replica of it, so that gradients must travel."""
    return plan(
        [pipe(1, 4, *(stage([2 * p + s], layers) for s, layers in enumerate(stages))) for p in range(2)],
        schedule=schedule,
    )


def test_gradients_leave_as_soon_as_their_last_product_is_there() -> None:
    spec = model()
    split = plan_from_dict(two("zero-bubble", [0, 2], [2, 4]), spec)
    for _, _, _, left in shared_pool().run(train, split, spec, torch.float32, 1.0)[:4]:
        # What must wait until others have arrived leaves at its place in the list.
        assert left[0] == "W3" and {a for a in left if not a.startswith("REDUCE")} == {"W3"}
    chunks = plan_from_dict(two("interleaved", [[0, 1], [2, 3]], [[1, 2], [3, 4]]), spec)
    for _, _, _, left in shared_pool().run(train, chunks, spec, torch.float32, 1.0)[:4]:
        # Those of the second chunk need not wait for the first one's last backward.
        assert left[0] == "B3.1"


def evaluate(comm: Comm, chosen: Plan, spec: ModelSpec) -> tuple[float, int]:
    compiled = CompiledPlan(chosen, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in chosen.ranks:
        return 0.0, 0
    runtime = Runtime(compiled, comm, torch.float64, lambda t, box: initial_values(t, box, spec, 7).double(), None)
    data = RandomSamples(Case(3, len(chosen.ranks), {}, {"seq_length": chosen.seq_length}), spec.vocab_size)
    return runtime.evaluate(data.fetch, 0, chosen.global_batch_size)


def test_evaluation_runs_the_forwards_of_every_schedule() -> None:
    spec = model(tie_word_embeddings=True)
    every = {
        "1f1b": [stage([0], [0, 2]), stage([1], [2, 4])],
        "zero-bubble": [stage([0], [0, 2]), stage([1], [2, 4])],
        "interleaved": [
            stage([0, 1], [[0, 1], [2, 2]], tp=2), stage([2], [[1, 2], [2, 3]]), stage([3], [[2, 2], [3, 4]]),
        ],
        "interleaved ": [stage([0], [[0, 1], [1, 3], [3, 4]])],
    }  # fmt: skip
    found = set()
    for name, stages in every.items():
        chosen = plan_from_dict(plan([pipe(1, 5, *stages)], schedule=name.strip()), spec)
        ((loss, tokens),) = set(shared_pool().run(evaluate, chosen, spec)[: len(chosen.ranks)])
        found.add((round(loss, 9), tokens))
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_fp16_with_a_loss_scale_equals_1f1b(tied: bool) -> None:
    spec = model(tie_word_embeddings=tied)
    plans = [plan_from_dict(two(name, [0, 2], [2, 4]), spec) for name in ("1f1b", "zero-bubble")]
    want, got = (shared_pool().run(train, chosen, spec, torch.float16, 1024.0)[:4] for chosen in plans)
    for (losses, norms, weights, _), (more, others, found, _) in zip(want, got, strict=True):
        np.testing.assert_allclose(more, losses, rtol=1e-6)
        np.testing.assert_allclose(others, norms, rtol=1e-5)
        for name, array in weights.items():
            np.testing.assert_array_equal(found[name], array)


def test_the_compiler_is_refused_where_backward_is_split(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    spec = load_model("tiny")
    path.write_text(dump_yaml(plan_from_dict(two("zero-bubble", [0, 3], [3, 6]), spec)))
    words = ["--plan", str(path), "--model", "tiny", "--dry-run"]
    assert configure(words, {"WORLD_SIZE": "4"}).compile is None
    with pytest.raises(UserError, match="--compile.*zero-bubble"):
        configure([*words, "--compile"], {"WORLD_SIZE": "4"})
