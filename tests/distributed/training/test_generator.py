"""GRPO beside a generator on ranks of its own, under any two plans: answers, loss, gradients and weights are those of
one process whose model of some steps before samples; and a run goes on after a rank of the generator was killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import BatchOptions, make_batch
from hetero_megatron.generation import Decoder, Sampling
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.roles import role_plan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.grpo import LOSS_TYPES, SCALES, Grpo
from hetero_megatron.training.answers import PlanSampler, RecordedSampling
from hetero_megatron.training.generator_client import GeneratorClient
from hetero_megatron.training.generator_ranks import GeneratorRank, ReceivedWeights
from hetero_megatron.training.role_messages import Answer, Instruction
from hetero_megatron.training.role_ranks import serve
from hetero_megatron.training.rollouts import Rollouts
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.weight_transfer import WeightTransfer
from tests.support.chat import TEMPLATES, chat_tokenizer
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
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks, start_ranks
from tests.support.random_plans import random_experts, random_model
from tests.support.selection import quick

Ranked = tuple[list[dict[str, float]], list[list[int]], list[tuple[str, Box, np.ndarray]]]


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: dict[str, np.ndarray], g: Grpo, begin: int
) -> Ranked | None:
    """None on ranks of the generator, and on those that are in neither plan."""
    apart = role_plan(made, "generator")
    assert apart is not None
    compiled, of_role = CompiledPlan(made, spec), CompiledPlan(apart, spec)
    comm.create_groups([*compiled.groups, *sorted(set(of_role.forward_groups) - set(compiled.groups))])
    meeting = comm.background_group((made.ranks[0], *apart.ranks))
    moved, data = WeightTransfer(comm, compiled, of_role), prompts_of(made.seq_length, spec.vocab_size)

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    def frozen(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        assert not tensor.trained, "trained weights come from the ranks that train"
        return initialize(tensor, box)

    if comm.rank in apart.ranks:
        here = ReceivedWeights(frozen, moved)
        kernels = kernels_of(apart, spec, comm)
        decoder = Decoder(apart, spec, comm, torch.float64, here, apart.seq_length, kernels)
        sampling = (RecordedSampling if g.may_be_stale else Sampling)(1.0, seed=SEED, ends=ENDS)
        work = GeneratorRank(g, PlanSampler(decoder, sampling, ANSWER), data, made.global_batch_size, {})
        told: Any = SimpleNamespace(check=lambda step: False, reason="")
        assert meeting is not None
        serve(meeting, made.ranks[0], work, Answer(), told)
        return None
    if comm.rank not in made.ranks:
        return None
    return train_rank(comm, compiled, initialize, g, begin, partial(GeneratorClient, comm, meeting), moved)


def train_rank(
    comm: Comm, compiled: CompiledPlan, initialize: Any, g: Grpo, begin: int, client_of: Any, moved: WeightTransfer
) -> Ranked:
    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=LR)

    made, spec, size = compiled.plan, compiled.spec, compiled.plan.global_batch_size
    runtime = Runtime(compiled, comm, torch.float64, initialize, sgd, options=RuntimeOptions(grpo=g))
    client: GeneratorClient = client_of(runtime.world, g, moved, size, STEPS)
    done: list[int] = []
    client.follow(runtime, lambda: len(done))
    judge, data = Judge() if runtime.world.index == 0 else None, prompts_of(made.seq_length, spec.vocab_size)
    rollouts = Rollouts(g, runtime, client, data, size, Numbers(), ENDS, judge)  # type: ignore[arg-type]
    runtime.hooks.before_forward, runtime.hooks.facts = rollouts.before_forward, rollouts.facts
    fetch = partial(make_batch, rollouts, options=BatchOptions(True, True))
    stats, answers = [], []
    for step in range(STEPS):
        found = runtime.train_step(fetch, begin + step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1)
        done.append(step)
        assert rollouts.rollout is not None
        stats.append({"loss": found.loss, "norm": found.grad_norm, "tokens": found.tokens, **found.facts})
        answers += [list(answer) for answer in rollouts.rollout.answers]
    client.end(Instruction(ends=True))
    built, params = runtime.stage_model, runtime.sync.params.items()
    return stats, answers, [(n, built.boxes[n], p.detach().cpu().numpy().copy()) for n, p in params]


def kernels_of(plan: Plan, spec: ModelSpec, comm: Comm) -> Any:
    from hetero_megatron.pipeline.stage_model import RankStage
    from hetero_megatron.spec.dropout import NO_DROPOUT
    from hetero_megatron.spec.flops import LOGITS_BYTES

    here = RankStage(plan, spec, comm.rank)
    return here.kernels(torch.float64, comm.device, False, LOGITS_BYTES, None, NO_DROPOUT)


def weights_seen(g: Grpo) -> dict[int, int]:
    """By step whose answers are sampled, how many steps the generator's weights have seen."""
    held, seen = None, dict[int, int]()
    for step in range(0, STEPS, g.iterations):
        asked = step - g.iterations if g.ahead and step else step
        if held is None or asked // g.sync_every > held // g.sync_every:
            held = asked
        seen[step] = held
    return seen


def generator_pipelines(rng: random.Random, spec: ModelSpec, size: int, first: int) -> list[dict[str, Any]]:
    """One or two pipelines of one or two stages of one or two ranks, from rank ``first`` on."""
    shares, pipelines, rank = [size], list[dict[str, Any]](), first
    if rng.random() < 0.5 and size > 1:
        shares = [rng.randrange(1, size)]
        shares.append(size - shares[0])
    for share in shares:
        rows, stages = rng.choice([d for d in range(1, share + 1) if share % d == 0]), []
        depth, tp = rng.choice([(1, 1), (2, 1), (1, 2)]) if len(shares) == 2 else rng.choice([(2, 2), (2, 1), (1, 2)])
        depth = min(depth, spec.num_layers)
        edges = [0, *sorted(rng.sample(range(1, spec.num_layers), depth - 1)), spec.num_layers]
        for a, b in zip(edges, edges[1:]):
            split = {"tp_split": [rng.randint(1, 3), 1]} if tp == 2 else {}
            stages.append({"ranks": list(range(rank, rank + tp)), "layers": [a, b], "tp": tp, **split})
            rank += tp
        pipelines.append({"micro_batch_size": rows, "num_micro_batches": share // rows, "stages": stages})
    return pipelines


@pytest.mark.parametrize("seed", quick(range(24), [21], [0, 8]))
def test_random_plans(seed: int) -> None:
    """Whole and with adapters; with weights of the step, or older ones, and the next answers sampled ahead."""
    rng = random.Random(seed + 900)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    check(rng, config, seed)


@pytest.mark.parametrize("seed", quick(range(12), [], [3]))
def test_experts(seed: int) -> None:
    """That the stages which train divide, and the generator does not."""
    rng = random.Random(seed + 50)
    check(rng, MOE_FAMILIES[rng.choice(["mixtral", "qwen3_moe", "gpt_oss"])], seed)


def check(rng: random.Random, config: dict[str, Any], seed: int) -> None:
    model, spec, initial, made = drawn_case(rng, config, seed)
    if spec.moe is not None:
        for stage in (stage for pipeline in made["pipelines"] for stage in pipeline["stages"]):
            stage["experts"] = random_experts(rng, stage["ranks"], spec.moe.num_experts, 9, 1)
    count = len(plan_from_dict(made, spec).ranks)
    made["roles"] = {"generator": {"pipelines": generator_pipelines(rng, spec, made["global_batch_size"], count)}}
    chosen = plan_from_dict(made, spec, roles={"generator": spec})
    g = Grpo(
        2, rng.choice([1, 1, 2]), 0.05, 0.03, 0.3 if spec.lora is not None else 0.0, rng.choice(LOSS_TYPES),
        rng.choice(SCALES), ANSWER, sync_every=rng.choice([1, 1, 2]), ahead=rng.random() < 0.6,
    )  # fmt: skip
    data, size, begin = prompts_of(chosen.seq_length, spec.vocab_size), chosen.global_batch_size, rng.choice([0, 7])
    wanted, answers = wanted_of(model, g, data, size, begin, weights_seen(g))
    weights = peft_values(model, spec) if spec.lora is not None else hf_to_logical(model, spec)
    ranks = [r for r in shared_pool().run(run_rank, chosen, spec, initial, g, begin) if r is not None]
    assert len(ranks) == len(chosen.ranks)
    for rank in ranks:
        is_wanted(rank, answers, wanted, weights, (g, made))


PLAN = """
version: 1
seq_length: 12
global_batch_size: 12
roles:
  generator:
    pipelines:
      - micro_batch_size: 4
        num_micro_batches: 3
        stages: [{ranks: 1, layers: [0, 1]}, {ranks: 2, layers: [1, 2]}]
pipelines:
  - {micro_batch_size: 4, num_micro_batches: 3, stages: [{ranks: 0, layers: [0, 2]}]}
"""
REWARDS = """
def small(completion_ids, **_):
    return [-float(sum(ids)) for ids in completion_ids]
"""
KILLED = 2  # a rank of the generator


def _kill_in_a_rollout() -> None:
    """As it samples the answers of the fourth step: of that one its stage has made some tokens."""
    if os.environ["RANK"] != str(KILLED):
        return
    from hetero_megatron.training import answers

    choose = answers.Sampling.choose

    def until_then(self: Any, logits: torch.Tensor, rows: Any) -> Any:
        if rows[0].number >= 3 * 12 and len(rows[0].answer) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return choose(self, logits, rows)

    answers.Sampling.choose = until_then  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_generator_that_is_killed_in_a_rollout_changes_nothing(tmp_path: Path) -> None:
    """The others end in one line each; and the run goes on as one whose own ranks sample."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    chat_tokenizer(tmp_path / "base", TEMPLATES["chatml"])
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"fox {i}"}) + "\n" for i in range(9)))
    (tmp_path / "both.yaml").write_text(PLAN)
    (tmp_path / "alone.yaml").write_text(re.sub(r"roles:.*?(?=\npipelines)", "", PLAN, flags=re.DOTALL))
    words = (
        f"--sft --grpo --load-hf {tmp_path}/base --data-path {tmp_path}/prompts.jsonl --split 1 --max-new-tokens 6 "
        f"--grpo-group-size 4 --reward-function {tmp_path}/rewards.py:small --lora-rank 4 --lora-base-dtype int8 "
        "--grpo-kl-beta 0.1 --train-iters 4 --lr 1e-2 --save-interval 2 --no-kernel-check --log-interval 1 --fp64"
    ).split()

    def of(name: str, plan: str) -> list[str]:
        return [*words, "--plan", f"{tmp_path}/{plan}.yaml", "--save", f"{tmp_path}/{name}", "--load",
                f"{tmp_path}/{name}"]  # fmt: skip

    programs = start_ranks(3, of("run", "both"), before=_kill_in_a_rollout)
    ended = [program.communicate(240) for program in programs]
    codes = [program.returncode for program in programs]
    assert codes[KILLED] == -signal.SIGKILL and set(codes) == {3, -signal.SIGKILL}, ended
    assert all(err.count("\n") == 1 for i, (_, err) in enumerate(ended) if i != KILLED), ended
    assert not (tmp_path / "run" / "iter_0000004").exists()
    run_ranks(3, of("run", "both"))
    run_ranks(1, of("alone", "alone"))
    found, wanted = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
                     for name in ("run", "alone"))  # fmt: skip
    keys = ("step", "loss", "grad_norm", "reward", "kl", "loss_tokens")
    assert [{k: row[k] for k in keys} for row in found] == [{k: row[k] for k in keys} for row in wanted]
    assert [row["staleness"] for row in found] == [0.0] * 4 and all(row["kl"] > 0 for row in found[1:])
