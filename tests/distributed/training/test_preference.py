"""Preference losses under any plan: values and gradients are those of transformers and peft in one process, one answer
at a time, with TRL's formulas, fp64."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch, BatchOptions, make_batch
from hetero_megatron.data.chat.packing import packed_sample
from hetero_megatron.data.sample import Sample
from hetero_megatron.data.scores_file import open_scores
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, Lora, ModelSpec, adapted
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.lora import TARGETS
from hetero_megatron.spec.preference import LOSSES, REWARDS, SMOOTHED, UNPAIRED, WITHOUT_REFERENCE, Preference
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.reference import KIND, _compute
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.peft_reference import adapter_values, keep_apart, peft_model, peft_values
from tests.support.pool import shared_pool
from tests.support.random_plans import random_model, random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

STEPS, LR = 2, 0.5


class RandomPairs:
    """Samples of one to three pairs with answers of unequal lengths, and padding; a function of (seed, index)."""

    def __init__(self, seed: int, length: int, vocab: int) -> None:
        self.seed, self.length, self.vocab = seed, length, vocab

    def answers(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, counts) of the chosen and rejected answers in turn."""
        rng = np.random.default_rng([self.seed, index])
        found, left = [], self.length
        while left >= 6 and len(found) < 6:
            sizes = rng.integers(3, max(left // 2, 3) + 1, 2)
            prompt = rng.integers(0, self.vocab, rng.integers(1, min(sizes)))
            for size in sizes:
                ids = np.concatenate([prompt, rng.integers(0, self.vocab, size - len(prompt))])
                found.append((ids, np.arange(size) >= len(prompt)))
            left -= int(sizes.sum())
        return found

    def __getitem__(self, index: int) -> Sample:
        answers = self.answers(index)
        numbers = tuple(10 * index + i for i in range(len(answers) // 2))
        return packed_sample(answers, self.length, 0)._replace(pairs=numbers)

    def fetch(self, indices: Any) -> Batch:
        return make_batch(self, indices, BatchOptions(True, True))


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=LR)


def run_rank(
    comm: Comm, made: Plan, spec: ModelSpec, initial: dict[str, np.ndarray], preference: Preference, seed: int,
    chunked: bool,
) -> tuple[list[list[float]], list[tuple[str, Box, np.ndarray]]]:  # fmt: skip
    made = plan_for(made, comm.islands)
    compiled = CompiledPlan(made, spec, pairs=True)
    comm.create_groups(compiled.groups)
    if comm.rank not in made.ranks:
        return [], []

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    options = RuntimeOptions(preference=preference, logits_bytes=4000 if chunked else LOGITS_BYTES)
    runtime = Runtime(compiled, comm, torch.float64, initialize, sgd, options=options)
    data, size = RandomPairs(seed, made.seq_length, spec.vocab_size), made.global_batch_size
    if not preference.in_step:
        known: dict[int, tuple[float, float]] = {}
        _compute(runtime, data.fetch, data, STEPS * size, size, known)
        if runtime.pairs is not None:
            runtime.pairs.reference.begin_step()
            runtime.pairs.reference.logps = known
    stats = []
    for step in range(STEPS):
        loss, count, rewards = runtime.evaluate_pairs(data.fetch, step * size, size)
        found = runtime.train_step(
            data.fetch, step * size, size, LR, clip_grad=1.0, loss_scale=4.0, step=step + 1, ahead=step + 1 < STEPS
        )
        assert found.tokens == count and abs(loss / count - found.loss) <= 1e-12 * abs(found.loss)
        np.testing.assert_allclose(list(rewards.values()), list(found.facts.values()), rtol=1e-9, atol=1e-12)
        stats.append([found.loss, found.grad_norm, found.tokens, *(found.facts[name] for name in REWARDS)])
    return stats, [(n, runtime.stage_model.boxes[n], p.detach().numpy().copy()) for n, p in runtime.sync.params.items()]


def log_probabilities(model: Any, answers: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """Of each answer alone, [answers]."""
    found = []
    for ids, counts in answers:
        tokens, mask = torch.from_numpy(ids)[None], torch.from_numpy(counts[1:])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        found.append(-F.cross_entropy(logits[mask], tokens[0, 1:][mask], reduction="sum"))
    return torch.stack(found)


def trl_loss(
    p: Preference, policy: torch.Tensor, ref: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, chosen rewards, rejected rewards) as DPOTrainer (loss_type), ORPOTrainer and CPOTrainer say;
    tests/slow/test_trl.py has them say it themselves."""
    average, whole = policy / lengths, (policy - ref).detach()
    if p.averages:
        policy, ref = average, ref / lengths
    if p.loss in WITHOUT_REFERENCE:
        ref = torch.zeros_like(policy)
    chosen, rejected = (policy - ref)[::2], (policy - ref)[1::2]
    delta, beta, eps, log = chosen - rejected, p.beta, p.smoothing, F.logsigmoid
    if p.loss in ("dpo", "cpo"):
        losses = -log(beta * delta) * (1 - eps) - log(-beta * delta) * eps
    elif p.loss == "hinge":
        losses = torch.relu(1 - beta * delta)
    elif p.loss == "ipo":
        losses = (delta - 1 / (2 * beta)) ** 2
    elif p.loss == "robust":
        losses = (-log(beta * delta) * (1 - eps) + log(-beta * delta) * eps) / (1 - 2 * eps)
    elif p.loss == "exo_pair":
        losses = (beta * delta).sigmoid() * (log(beta * delta) - math.log(1 - eps))
        losses = losses + (-beta * delta).sigmoid() * (log(-beta * delta) - math.log(eps))
    elif p.loss == "nca_pair":
        losses = -log(beta * chosen) - 0.5 * log(-beta * chosen) - 0.5 * log(-beta * rejected)
    elif p.loss == "sppo_hard":
        losses = (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    elif p.loss == "apo_zero":
        losses = 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
    elif p.loss == "apo_down":
        losses = (beta * chosen).sigmoid() + 1 - (beta * delta).sigmoid()
    elif p.loss == "simpo":
        losses = -log(beta * (delta - p.gamma / beta))
    else:
        assert p.loss == "orpo"
        odds = delta - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        losses = -chosen + beta * -log(odds)
    losses = losses - p.sft_weight * average[::2]
    if p.loss not in WITHOUT_REFERENCE:
        chosen, rejected = whole[::2], whole[1::2]
    return losses, (beta * chosen).detach(), (beta * rejected).detach()


def check(
    config: dict[str, Any], made: dict[str, Any], lora: Lora | None, p: Preference, seed: int, chunked: bool
) -> None:
    model, spec = make_hf(config, seed)
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, spec).items()}
    if lora is not None:
        spec = adapted(spec, lora)
        initial |= adapter_values(spec, seed)
        model = peft_model(model, spec, initial)
        keep_apart(model, spec)
    params = [q for q in model.parameters() if q.requires_grad]
    optimizer, chosen = torch.optim.SGD(params, lr=LR), plan_from_dict(made, spec)
    data, size = RandomPairs(seed, chosen.seq_length, spec.vocab_size), chosen.global_batch_size
    batches = [[a for i in range(step * size, (step + 1) * size) for a in data.answers(i)] for step in range(STEPS)]
    with torch.no_grad(), model.disable_adapter() if lora is not None else nullcontext():
        references = [log_probabilities(model, answers) for answers in batches]
    wanted = []
    for answers, reference in zip(batches, references, strict=True):
        optimizer.zero_grad()
        lengths = torch.tensor([counts[1:].sum() for _, counts in answers], dtype=torch.float64)
        policy = log_probabilities(model, answers)
        losses, good, bad = trl_loss(p, policy, reference, lengths)
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        shown = policy.detach() / lengths if p.averages and p.loss in WITHOUT_REFERENCE else policy.detach()
        facts = (good, bad, (good > bad).double(), good - bad, shown[::2], shown[1::2])
        wanted.append([losses.mean().item(), float(norm), len(losses), *(fact.mean().item() for fact in facts)])
    weights = peft_values(model, spec) if lora is not None else hf_to_logical(model, spec)
    ranks = [r for r in shared_pool().run(run_rank, chosen, spec, initial, p, seed, chunked) if r[0]]
    assert len(ranks) == len(chosen.ranks)
    for stats, values in ranks:
        np.testing.assert_allclose(stats, wanted, rtol=1e-9, atol=1e-11, err_msg=f"{p} {made}")
        for name, box, found in values:
            error = np.abs(found - weights[name].detach().numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, p, made)


def preferences(rng: random.Random, in_step: bool) -> Iterator[Preference]:
    """Every loss, in random order, with random options."""
    paired = [loss for loss in LOSSES if loss not in UNPAIRED]
    for loss in rng.sample(paired, len(paired)):
        rate = rng.choice([0.0, 0.2]) if loss in SMOOTHED else 0.0
        rate = 0.1 if loss == "exo_pair" else rate
        weight = rng.choice([0.0, 0.3])
        yield Preference(loss, rng.choice([0.1, 0.7]), rate, rng.random() < 0.4, weight, 0.4, in_step)


@pytest.mark.parametrize("seed", quick(range(24), [2], [3]))
def test_random_plans(seed: int) -> None:
    """Whole, and with adapters; tokens of an answer on several ranks, and head and loss in chunks, among them."""
    rng = random.Random(seed + 9000)
    config = random_model(rng)
    while config["model_type"] == "gpt2":
        config = random_model(rng)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    length, lora = rng.randint(12, 24), None
    if seed % 2:
        targets = TARGETS if rng.random() < 0.5 else tuple(rng.sample(TARGETS, rng.randint(1, 4)))
        lora = Lora(rng.choice([1, 3]), 4.0, targets, dora=rng.random() < 0.3)
    losses = preferences(rng, in_step=lora is not None and rng.random() < 0.7)
    for p in [next(losses) for _ in range(2)]:
        made = random_plan(rng, layers, heads, length, ranks=rng.choice([1, 2, 3, 4]))
        check(config, made, lora, p, seed, chunked=rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_every_loss(chunked: bool) -> None:
    """Half of them whole, half with adapters and head and loss in chunks; the stage of the head has context groups with
    unequal tokens, beside another pipeline."""
    groups = [{"ranks": [0, 1], "tokens": [11, 7], "heads": [2, 4]}]
    made = plan([
        pipe(1, 2, stage([0, 1], [0, 3], context=groups)),
        pipe(2, 1, stage([2], [0, 2]), stage([3], [2, 3])),
    ]) | {"seq_length": 18}  # fmt: skip
    for p in sorted(preferences(random.Random(3), in_step=chunked), key=lambda p: p.loss)[chunked::2]:
        check(LLAMA, made, Lora(2, 4.0) if chunked else None, p, 5, chunked)


@pytest.mark.slow
def test_the_command_goes_on_and_keeps_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole fine-tuning, killed and resumed: same losses bit for bit as straight through, and the reference is that of
    the first weights, from the file or computed again; rewards are in metrics.jsonl."""

    def run(*words: str, code: int = 0) -> str:
        """What one rank prints."""
        capsys.readouterr()
        assert main(["finetune", *(word for text in words for word in text.split())]) == code
        found = capsys.readouterr()
        return found.out + found.err

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=330, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    chat_tokenizer(tmp_path / "base", TEMPLATES["chatml"])
    pairs = [
        {"chosen": turns(f"say {i}", "yes"), "rejected": turns(f"say {i}", "no, not " * (1 + i % 3))}
        for i in range(20)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = f"--load-hf {tmp_path}/base --data-path {tmp_path}/pairs.jsonl --split 80,20,0 --seq-length 64 "
    words += "--no-kernel-check --log-interval 1 "
    words += "--preference dpo --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-2 "
    words += f"--lr-decay-style constant --eval-iters 1 --eval-interval 3 --save {tmp_path}/run --load {tmp_path}/run "
    file = tmp_path / "reference.scores"
    first = run(words, f"--reference-logps {file} --exit-interval 3")
    assert "log-probabilities of 20 pairs computed" in first and "accuracy" in first
    made = file.read_bytes()
    assert len(open_scores(str(file), "", KIND).arrays["numbers"]) == 20
    again = run(words, f"--reference-logps {file}")
    assert "computed" not in again and file.read_bytes() == made
    straight = run(words.replace(f"{tmp_path}/run", f"{tmp_path}/whole"))
    assert "log-probabilities of 20 pairs computed" in straight
    records = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
               for name in ("run", "whole")]  # fmt: skip
    keys = ("step", "loss", "pairs", *REWARDS, "validation_loss", "validation_rewards/accuracies")
    found, wanted = ([{k: r[k] for k in keys if k in r} for r in rows] for rows in records)
    assert found == wanted and len(found) == 8 and abs(found[0]["loss"] - math.log(2)) < 1e-6
    assert found[0]["pairs"] >= 4 and found[-2]["rewards/accuracies"] == 1.0
    other = tmp_path / "other"
    LlamaForCausalLM(config).save_pretrained(other)
    chat_tokenizer(other, TEMPLATES["chatml"])
    changed = words.replace(f"{tmp_path}/base", str(other)).replace("--train-iters 6", "--train-iters 8")
    assert "trained beside another reference" in run(changed, code=2)
    beside = words.replace(f"{tmp_path}/base", str(other)).replace(f"{tmp_path}/run", f"{tmp_path}/beside")
    beside = beside.replace("--train-iters 6", "--train-iters 1")
    run(beside, f"--reference-hf {tmp_path}/base --reference-logps {file}")
    line = json.loads((tmp_path / "beside" / "metrics.jsonl").read_text().splitlines()[0])
    assert file.read_bytes() == made and abs(line["rewards/chosen"]) > 1e-3, "the model is not its own reference"
