"""One step of preference losses from the same directory and records: loss, gradients and metrics are those of TRL's own
trainers, fp32. Skipped where TRL is not installed (``pip install --no-deps trl``)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from hetero_megatron.pipeline.distillation import divergence_terms
from hetero_megatron.pipeline.rollout_loss import token_losses
from hetero_megatron.spec.distillation import Distillation
from hetero_megatron.spec.grpo import LOSS_TYPES, Grpo
from hetero_megatron.spec.preference import REWARDS
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.grpo_reference import loss_of

pytestmark = pytest.mark.slow
KTO = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
PAIRS = [
    {"chosen": turns(f"say {i}", "yes" + " it is" * (i % 3)), "rejected": turns(f"say {i}", "no, not " * (1 + i % 4))}
    for i in range(6)
]
TEXTS = [
    {"prompt": f"Is it {i}?", "chosen": " Yes" * (1 + i % 3), "rejected": " No, not" * (2 + i % 2)} for i in range(6)
]
LABELLED = [
    {"prompt": pair[side][:1], "completion": pair[side][1:], "label": side == "chosen"}
    for i, pair in enumerate(PAIRS) for side in (("chosen", "rejected") if i % 3 else ("rejected",))
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base`` and ``other``: a model and its reference, with one tokenizer."""
    root = tmp_path_factory.mktemp("trl")
    for seed, name in enumerate(("base", "other")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=330, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=512, initializer_range=0.1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(root / name)
        chat_tokenizer(root / name, TEMPLATES["chatml"])
    return root


def ours(
    models: Path, tmp_path: Path, records: list[Any], words: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(metrics, gradients by Hugging Face name) of one step of SGD over all records in one sample."""
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (
        f"finetune --load-hf {models}/base --data-path {tmp_path}/records.jsonl --split 100,0,0 --seq-length 512 "
        "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1 --lr-decay-style constant --optimizer sgd "
        "--sgd-momentum 0 --weight-decay 0 --clip-grad 0 --eval-iters 0 --log-interval 1 --no-kernel-check "
        f"--save {tmp_path}/run --save-hf {tmp_path}/out {words}"
    )
    assert main(words.split()) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    before, after = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (models / "base", tmp_path / "out")
    )
    return line, {
        n: p.detach() - q.detach() for (n, p), q in zip(before.named_parameters(), after.parameters(), strict=True)
    }


def trainer(kind: str, models: Path, tmp_path: Path, records: list[Any], **options: Any) -> Any:
    """TRL's, with all records in its one batch."""
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    module = trl if kind in ("DPO", "KTO") else pytest.importorskip(f"trl.experimental.{kind.lower()}")
    model, reference = (
        AutoModelForCausalLM.from_pretrained(models / n, dtype=torch.float32) for n in ("base", "other")
    )
    config = getattr(module, f"{kind}Config")(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(records), max_length=512, report_to="none",
        use_cpu=True, bf16=False, **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(models / "base", pad_token="<|end|>")
    if kind not in ("DPO", "KTO"):  # which would put it before texts that the tokenizer itself does not begin so
        tokenizer.bos_token = None
    beside = {"ref_model": reference} if kind in ("DPO", "KTO") else {}
    return getattr(module, f"{kind}Trainer")(
        model=model.train(), args=config, train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer, **beside,
    )  # fmt: skip


def compare(made: Any, loss: torch.Tensor, line: dict[str, Any], found: dict[str, torch.Tensor], facts: Any) -> None:
    loss.backward()
    assert line["loss"] == pytest.approx(loss.item(), rel=2e-5)
    said = (made._metrics if hasattr(made, "_metrics") else made._stored_metrics)["train"]
    for name in facts:
        wanted = said[name][-1]
        assert line[name] == pytest.approx(wanted, rel=2e-5, abs=1e-5), name
    for name, param in made.model.named_parameters():
        scale = param.grad.abs().max().item()
        torch.testing.assert_close(found[name], param.grad, rtol=1e-4, atol=3e-5 * max(scale, 0.01), msg=name)


DPO: list[tuple[str, dict[str, Any], str]] = [
    ("dpo", {"loss_type": ["sigmoid"]}, ""),
    ("dpo", {"loss_type": ["sigmoid_norm"]}, "--dpo-average-log-probs"),
    ("ipo", {"loss_type": ["ipo"]}, ""), ("hinge", {"loss_type": ["hinge"]}, ""),
    ("robust", {"loss_type": ["robust"], "label_smoothing": 0.2}, "--dpo-label-smoothing 0.2"),
    ("exo_pair", {"loss_type": ["exo_pair"], "label_smoothing": 0.01}, "--dpo-label-smoothing 0.01"),
    ("nca_pair", {"loss_type": ["nca_pair"]}, ""), ("sppo_hard", {"loss_type": ["sppo_hard"]}, ""),
    ("apo_zero", {"loss_type": ["apo_zero"]}, ""), ("apo_down", {"loss_type": ["apo_down"]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "options", "words"), DPO)
def test_dpo(loss: str, options: dict[str, Any], words: str, models: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    records = PAIRS if loss != "hinge" else TEXTS
    words = f"--preference {loss} --dpo-beta 0.3 --reference-hf {models}/other {words}"
    line, found = ours(models, tmp_path, records, words)
    made = trainer("DPO", models, tmp_path, records, beta=0.3, **options)
    batch = next(iter(made.get_train_dataloader()))
    compare(made, made.compute_loss(made.model, batch), line, found, REWARDS)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto(loss: str, models: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    words = f"--preference {loss} --dpo-beta 0.3 --reference-hf {models}/other"
    words += " --kto-desirable-weight 1.2 --kto-undesirable-weight 0.7"
    line, found = ours(models, tmp_path, LABELLED, words)
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    made = trainer("KTO", models, tmp_path, LABELLED, beta=0.3, loss_type=loss, **weights)
    batch = next(iter(made.get_train_dataloader()))
    compare(made, made.compute_loss(made.model, batch), line, found, KTO)


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        ("cpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}, "--dpo-label-smoothing 0.1"),
        ("simpo", {"loss_type": "simpo", "simpo_gamma": 0.4}, "--simpo-gamma 0.4"),
    ],
)
def test_cpo(loss: str, options: dict[str, Any], words: str, models: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    line, found = ours(models, tmp_path, TEXTS, f"--preference {loss} --dpo-beta 0.3 {words}")
    made = trainer("CPO", models, tmp_path, TEXTS, beta=0.3, cpo_alpha=0.0, **options)
    batch = next(iter(made.get_train_dataloader()))
    compare(made, made.compute_loss(made.model, batch), line, found, REWARDS)


def test_orpo(models: Path, tmp_path: Path) -> None:
    """The ratio of odds is TRL's; the chosen answer's own loss is the paper's, where TRL's counts the prompt, too."""
    pytest.importorskip("trl")
    line, found = ours(models, tmp_path, TEXTS, "--preference orpo --dpo-beta 0.3")
    made = trainer("ORPO", models, tmp_path, TEXTS, beta=0.3)
    batch = next(iter(made.get_train_dataloader()))
    made.compute_loss(made.model, batch)
    chosen, rejected = made.concatenated_forward(made.model, batch)[:2]
    loss = -chosen.mean() - made.odds_ratio_loss(chosen, rejected)[0].mean()
    compare(made, loss, line, found, REWARDS)


@pytest.mark.parametrize(
    ("d", "beta"),
    [
        (Distillation(loss="forward_kl"), 0.0), (Distillation(loss="reverse_kl"), 1.0),
        (Distillation(loss="js", js_beta=0.3), 0.3), (Distillation(loss="js", js_beta=0.5), 0.5),
    ],
)  # fmt: skip
def test_divergences_are_those_of_gkd(d: Distillation, beta: float) -> None:
    """Values and gradients with respect to logits, fp64."""
    pytest.importorskip("trl")
    gkd = pytest.importorskip("trl.experimental.gkd")
    torch.manual_seed(2)
    student = (torch.randn(3, 5, 40, dtype=torch.float64) * 4).requires_grad_()
    teacher = torch.randn(3, 5, 40, dtype=torch.float64) * 4
    p, q = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    terms, slopes = divergence_terms(p, q, d)
    wanted = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum")
    torch.testing.assert_close(terms.sum(), wanted.detach(), rtol=1e-12, atol=0)
    gradient = slopes - p.exp() * slopes.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, student)[0], rtol=1e-11, atol=1e-13)


def test_gkd_step(models: Path, tmp_path: Path) -> None:
    """A step of distillation beside the teacher: TRL's trainer on the same conversations, without the student's own."""
    pytest.importorskip("trl")
    datasets, gkd = pytest.importorskip("datasets"), pytest.importorskip("trl.experimental.gkd")
    records = [{"messages": pair["chosen"]} for pair in PAIRS]
    words = f"--teacher-hf {models}/other --distill-weight 1 --distill-loss js --distill-js-beta 0.3"
    line, found = ours(models, tmp_path, records, words)
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(models / n, dtype=torch.float32) for n in ("base", "other")
    )
    config = gkd.GKDConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(records), report_to="none", use_cpu=True,
        bf16=False, lmbda=0.0, beta=0.3, temperature=1.0,
    )  # fmt: skip
    made = gkd.GKDTrainer(
        model=student.train(), teacher_model=teacher, args=config,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(models / "base", pad_token="<|end|>"),
    )  # fmt: skip
    batch = next(iter(made.get_train_dataloader()))
    loss = made.compute_loss(made.model, batch)
    compare(made, loss, line, found, ())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo(loss_type: str, models: Path, tmp_path: Path) -> None:
    """Advantages of rewards, and loss and gradients on answers that a policy before the model sampled: fp64."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    scale = {"dapo": "group", "grpo": "none", "dr_grpo": "batch"}[loss_type]
    g = Grpo(4, 2, 0.03, 0.02, 0.3, loss_type, scale, max_new_tokens=6, weighs_kl=loss_type != "grpo")
    rewards: list[float] = []

    def judge(completions: list[str], **_: Any) -> list[float | None]:
        rewards[:] = [len(text) % 5 + 0.5 * (i % 3) for i, text in enumerate(completions)]
        rewards[2] = math.nan  # an answer that is not judged
        return [None if math.isnan(reward) else reward for reward in rewards]

    model = AutoModelForCausalLM.from_pretrained(models / "base", dtype=torch.float64)
    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=8, report_to="none", use_cpu=True, bf16=False,
        num_generations=4, num_iterations=2, epsilon=0.03, epsilon_high=0.02, beta=0.3, loss_type=loss_type,
        scale_rewards=scale, max_completion_length=6, top_k=0,
        use_bias_correction_kl=g.weighs_kl,
    )  # fmt: skip
    prompts = [{"prompt": f"say {i}"} for i in (1, 22)]
    made = trl.GRPOTrainer(
        model=model, reward_funcs=judge, args=config, train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(models / "base", pad_token="<|end|>"),
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 1
    made.ref_model.double()

    def logps_of(model: Any, ids: torch.Tensor, attention: torch.Tensor, kept: int, *_: Any, **__: Any) -> Any:
        """TRL's own computes the head in fp32."""
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -kept - 1 : -1].log_softmax(-1)
        logps = logits.gather(-1, ids[:, -kept:, None])[..., 0]
        return logps, torch.zeros_like(logps).detach(), None

    made._get_per_token_logps_and_entropies = logps_of
    torch.manual_seed(5)
    inputs = made._generate_and_score_completions([prompt for prompt in prompts for _ in range(4)])
    found = torch.tensor(g.advantages(rewards), dtype=torch.float64)
    torch.testing.assert_close(inputs["advantages"].double(), found, rtol=1e-5, atol=1e-6)
    inputs["advantages"] = found
    with torch.no_grad():
        for param in made.model.parameters():
            param += 0.02 * torch.randn_like(param)
    made.model.train()
    loss = made._compute_loss(made.model, inputs)
    wanted = torch.autograd.grad(loss, list(made.model.parameters()))
    mask, reference = inputs["completion_mask"], inputs["ref_per_token_logps"]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], mask], 1)
    policy = logps_of(made.model, ids, attention, mask.shape[1])[0]
    old, counted = inputs["old_per_token_logps"], mask.double()
    tokens, facts = token_losses(g, policy, old, reference, found[:, None])
    weights = torch.tensor(g.weights(mask.sum(1).tolist()), dtype=torch.float64)[:, None]
    said = {name: values[-1] for mode in ("eval", "train") for name, values in made._metrics[mode].items()}
    summary = g.summary(rewards, mask.sum(1).tolist(), [said["completions/clipped_ratio"]] * 8)
    assert summary == pytest.approx({name: said[name] for name in summary}, rel=1e-5)
    means = dict(zip(g.facts, ((facts * counted).sum((1, 2)) / counted.sum()).tolist(), strict=True))
    assert means == pytest.approx({name: said[name] for name in means}, rel=1e-6) and min(means.values()) > 0
    plain, _ = loss_of(g, policy, old, reference, found, counted)
    for ours in ((tokens * weights * counted).sum() / counted.sum(), plain):
        torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
        for mine, theirs in zip(torch.autograd.grad(ours, list(made.model.parameters()), retain_graph=True), wanted):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
