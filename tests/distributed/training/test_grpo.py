"""GRPO under any plan: answers, rewards, loss, gradients and weights are those of one process over transformers' and
peft's models with TRL's formulas, fp64."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import BatchOptions, make_batch
from hetero_megatron.generation import Decoder, Sampling, SharedWeights
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.grpo import LOSS_TYPES, SCALES, Grpo
from hetero_megatron.training.answers import OwnSampler, PlanSampler
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.rollouts import Rollouts
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.grpo_run import (
    ANSWER,
    ENDS,
    LR,
    SEED,
    STEPS,
    Judge,
    Numbers,
    drawn_case,
    is_wanted,
    prompts_of,
    wanted_of,
)
from tests.support.hf_reference import hf_to_logical
from tests.support.moe_models import MOE_FAMILIES
from tests.support.peft_reference import peft_values
from tests.support.pool import Pool, shared_pool
from tests.support.programs import run_ranks, start_ranks
from tests.support.random_plans import random_model
from tests.support.selection import quick
from tests.support.small_plans import LLAMA


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: dict[str, np.ndarray], g: Grpo, begin: int, chunked: bool
) -> tuple[list[dict[str, float]], list[list[int]], list[tuple[str, Box, np.ndarray]]]:
    made = plan_for(made, comm.islands)
    compiled = CompiledPlan(made, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in made.ranks:
        return [], [], []

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=LR)

    options = RuntimeOptions(grpo=g, logits_bytes=4000 if chunked else LOGITS_BYTES)
    runtime = Runtime(compiled, comm, torch.float64, initialize, sgd, options=options)
    built, size = runtime.stage_model, made.global_batch_size
    shared = SharedWeights(dict(built.module.named_parameters()), built.scales)
    decoder = Decoder(made, spec, comm, torch.float64, shared, made.seq_length, built.kernels)
    judge = Judge() if runtime.world.index == 0 else None
    sampler = OwnSampler(PlanSampler(decoder, Sampling(1.0, seed=SEED, ends=ENDS), ANSWER, g.rows))
    data = prompts_of(made.seq_length, spec.vocab_size)
    rollouts = Rollouts(g, runtime, sampler, data, size, Numbers(), ENDS, judge)  # type: ignore[arg-type]
    runtime.hooks.before_forward, runtime.hooks.facts = rollouts.before_forward, rollouts.facts
    fetch = partial(make_batch, rollouts, options=BatchOptions(True, True))
    stats, answers = [], []
    for step in range(STEPS):
        found = runtime.train_step(fetch, begin + step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1)
        assert rollouts.rollout is not None
        stats.append({"loss": found.loss, "norm": found.grad_norm, "tokens": found.tokens, **found.facts})
        answers += [list(answer) for answer in rollouts.rollout.answers]
    params = runtime.sync.params.items()
    return stats, answers, [(n, built.boxes[n], p.detach().cpu().numpy().copy()) for n, p in params]


@pytest.mark.parametrize("seed", quick(range(24), [3], [1, 4]))
def test_random_plans(seed: int) -> None:
    """Whole, and with adapters beside the base as a reference; several steps on the same answers; some runs go on after
    batches of another size."""
    rng = random.Random(seed + 700)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    check(rng, config, seed, shared_pool())


@pytest.mark.slow
def test_experts() -> None:
    """Of which each rank that trains has columns of all."""
    check(random.Random(710), MOE_FAMILIES["mixtral"], 1, shared_pool())


@pytest.mark.slow
@pytest.mark.usefixtures("extension")
def test_on_late_devices() -> None:
    """Rows, their advantages and the weights that are shared, on devices whose streams run behind the host."""
    check(random.Random(708), LLAMA, 8, shared_pool(("emulated:late=0.0003",) * 8), {"attention": "reference"})


def check(rng: random.Random, config: dict[str, Any], seed: int, pool: Pool, kernels: Mapping[str, str] = {}) -> None:
    """``kernels``: of all stages."""
    model, spec, initial, made = drawn_case(rng, config, seed)
    for pipeline in made["pipelines"]:
        for stage in pipeline["stages"]:
            stage |= {"kernels": dict(kernels)} if kernels else {}
    chosen = plan_from_dict(made, spec)
    g = Grpo(
        2, rng.choice([1, 2]), 0.05, 0.03, 0.3 if spec.lora is not None else 0.0, rng.choice(LOSS_TYPES),
        rng.choice(SCALES), ANSWER, rng.choice([2, 32]), weighs_kl=rng.random() < 0.7,
    )  # fmt: skip
    data, size, begin = prompts_of(chosen.seq_length, spec.vocab_size), chosen.global_batch_size, rng.choice([0, 7])
    wanted, answers = wanted_of(model, g, data, size, begin)
    weights = peft_values(model, spec) if spec.lora is not None else hf_to_logical(model, spec)
    ranks = [r for r in pool.run(run_rank, chosen, spec, initial, g, begin, rng.random() < 0.5) if r[0]]
    assert len(ranks) == len(chosen.ranks)
    for rank in ranks:
        is_wanted(rank, answers, wanted, weights, (g, made))


REWARDS = """import os, signal
from pathlib import Path

def longest(prompts, completions, completion_ids, marker, **_):
    print("judging", len(completions))
    mark = Path(marker[0])
    if len(os.environ.get("KILLED", "")) and mark.exists():
        os.kill(os.getppid(), signal.SIGKILL)
    mark.touch()
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    assert all(isinstance(prompt, str) == isinstance(text, str) for prompt, text in zip(prompts, completions))
    return [len(set(text)) + len(ids) for text, ids in zip(texts, completion_ids)]
"""


@pytest.mark.slow
def test_killed_in_a_rollout(tmp_path: Path) -> None:
    """Two stages on a base in 4 bits, with a reference and two steps on the same answers: the first rank is killed
    while it waits for the second rewards; then the run goes on, and its numbers are those of one that was not killed.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=330, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    chat_tokenizer(tmp_path / "base", TEMPLATES["chatml"])
    (tmp_path / "rewards.py").write_text(REWARDS)

    def words(name: str) -> list[str]:
        records = [{"prompt": turns(f"say {i}", "")[:1] if i % 2 else f"say {i}", "marker": f"{tmp_path}/{name}.mark"}
                   for i in range(9)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return (
            f"--sft --grpo --load-hf {tmp_path}/base --data-path {tmp_path}/{name}.jsonl --split 100,0,0 "
            "--seq-length 48 --max-new-tokens 6 --micro-batch-size 2 --global-batch-size 8 --grpo-group-size 4 "
            f"--reward-function {tmp_path}/rewards.py:longest --grpo-iterations 2 --grpo-kl-beta 0.1 --lora-rank 4 "
            "--lora-base-dtype nf4 --pipeline-model-parallel-size 2 --train-iters 6 --lr 1e-2 --save-interval 2 "
            f"--no-kernel-check --save {tmp_path}/{name} --load {tmp_path}/{name}"
        ).split()

    programs = start_ranks(2, words("killed"), KILLED="1")
    assert programs[0].wait(240) == -signal.SIGKILL, programs[0].output()
    assert programs[1].wait(240) != 0
    assert not (tmp_path / "killed" / "iter_0000004").exists()
    run_ranks(2, words("killed"))
    run_ranks(2, words("straight"))
    lines = {}
    for name in ("killed", "straight"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        lines[name] = [{k: r[k] for k in ("step", "loss", "grad_norm", "reward", "kl", "loss_tokens")} for r in rows]
    assert lines["killed"] == lines["straight"] and [row["step"] for row in lines["straight"]] == [1, 2, 3, 4, 5, 6]
    assert all(row["kl"] > 0 for row in lines["straight"][1:])
