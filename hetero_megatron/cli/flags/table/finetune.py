"""Flags about fine-tuning: conversations, and what of them counts."""

from hetero_megatron.cli.flags.flag import count, needs, switch, value
from hetero_megatron.data.config import OVERLONG
from hetero_megatron.spec.lora import BASE_DTYPES, EVERY_TARGET, LEAST_ALPHA, MAX_RANK, MOST_ALPHA, SITE_WORD
from hetero_megatron.spec.preference import LOSSES, UNPAIRED

_PAIRS = needs("--preference")
_LABELS = needs(*(f"--preference {loss}" for loss in UNPAIRED))
_SFT, _LORA, _ADAPTERS = needs("--sft"), needs("--lora-rank"), needs("--lora-rank", "--load-adapter")

FLAGS = (
    switch(
        "--sft", "the data are conversations (messages, ShareGPT's conversations or conversation, prompt and "
        "completion, or Alpaca's instruction and output) in *.jsonl, *.json, *.parquet, *.arrow or hub:NAME; "
        "hetero-megatron finetune sets it",
    ),
    value(
        "--chat-template", str, None, "file with a Jinja template, or the name of one of the tokenizer's; if left out, "
        "the tokenizer's own, as transformers chooses", needs=_SFT,
    ),
    value(
        "--sft-loss", str, "assistant", "what counts in the loss: what the assistant wrote, or all of a conversation",
        choices=("assistant", "all"), needs=_SFT,
    ),
    value(
        "--overlong-samples", str, "keep-start", "conversations longer than --seq-length: cut at their end or start, "
        "left out, or refused; the run says how many there were",
        choices=OVERLONG, needs=_SFT,
    ),
    value(
        "--epochs", float, None, "instead of --train-iters: how often to go through the conversations, in whole steps",
        least=1e-6, most=1e6, needs=_SFT,
    ),
    switch("--no-packing", "every conversation has a sample of its own, filled with padding", needs=_SFT),
    value(
        "--preference", str, None, "train on preference pairs (chosen and rejected) with this loss: dpo is TRL's "
        "sigmoid, the others have its names; orpo, simpo and cpo have no reference model; kto and apo_zero_unpaired "
        "train on answers with a label each", choices=tuple(LOSSES),
        needs=_SFT,
    ),
    value(
        "--dpo-beta", float, 0.1, "how much log-probabilities of answers count, for any loss of --preference; of orpo "
        "the weight of the odds ratio", least=1e-6, most=1e6, needs=_PAIRS,
    ),
    value(
        "--dpo-label-smoothing", float, 0.0, "probability that a pair is labelled the wrong way round, of dpo, robust, "
        "exo_pair and cpo", least=0.0, below=1.0, needs=_PAIRS,
    ),
    switch(
        "--dpo-average-log-probs", "log-probabilities of answers are divided by their tokens (those of ipo, orpo and "
        "simpo always are)", needs=_PAIRS,
    ),
    value(
        "--dpo-sft-weight", float, 0.0, "of the chosen answer's own loss, mean over its tokens, which is added to the "
        "pair's", least=0.0, most=1e6, needs=_PAIRS,
    ),
    value(
        "--simpo-gamma", float, 0.5, "margin of --preference simpo", least=0.0, most=1e6,
        needs=needs("--preference simpo"),
    ),
    value(
        "--kto-desirable-weight", float, 1.0, "weight of the losses of answers that are labelled as desired",
        least=0.0, most=1e6, needs=_LABELS,
    ),
    value(
        "--kto-undesirable-weight", float, 1.0, "weight of the losses of the others", least=0.0, most=1e6,
        needs=_LABELS,
    ),
    value(
        "--reference-hf", str, None, "Hugging Face directory of the reference: a model of the same shape, or any with "
        "the same tokenizer on the ranks that the plan has for it (roles: reference); if left out, the model that "
        "training begins with, or with adapters their base", needs=_PAIRS,
    ),
    value(
        "--reference-logps", str, None, "file to read the reference's log-probabilities from if it is there, else to "
        "write, once before the first step; without it, a run with adapters computes them in each step",
        needs=_PAIRS,
    ),
    count(
        "--lora-rank", None, "train adapters of this rank beside a frozen base (LoRA); the base is --load-hf",
        most=MAX_RANK,
    ),
    value(
        "--lora-alpha", float, None, "adapters count alpha / rank; the rank if left out",
        least=LEAST_ALPHA, most=MOST_ALPHA, needs=_LORA,
    ),
    value(
        "--lora-targets", str, None, f"projections with an adapter ({', '.join(EVERY_TARGET)}), or one regular "
        "expression over whole names of modules in the model's files; all linear layers if left out", nargs="+",
        needs=_LORA,
    ),
    value(
        "--lora-layers", str, None, "layers with adapters, such as 0-3 7; all if left out", nargs="+", needs=_LORA,
    ),
    value(
        "--lora-sites", str, None, f"adapters that differ by layer: all that there are, each {SITE_WORD}", nargs="+",
        needs=_LORA,
    ),
    value(
        "--lora-dropout", float, None, "dropout of adapters' inputs; if left out --load-adapter's, or 0", below=1.0,
        least=0.0, needs=_ADAPTERS,
    ),
    value(
        "--lora-base-dtype", str, None, "stored dtype of the frozen projections (nf4: 4 bits, as QLoRA); the run's if "
        "left out",
        choices=BASE_DTYPES, needs=_ADAPTERS,
    ),
    switch("--use-rslora", "adapters count alpha / sqrt(rank)", needs=_LORA),
    switch("--use-dora", "DoRA: rows of adapted matrices have trained lengths", needs=_LORA),
    value("--load-adapter", str, None, "directory of peft's adapters to begin with; it has their rank"),
    value("--save-adapter", str, None, "new directory: the adapters as peft reads them, at the end", needs=_ADAPTERS),
    switch("--merge-lora", "--save-hf writes the base with the adapters merged into it", needs=(
        *_ADAPTERS, *needs("--save-hf"),
    )),
    count(
        "--shuffle-buffer", 1000, "conversations of a stream that are shuffled together",
        most=10**7, needs=needs("--dataloader-type streaming"),
    ),
)  # fmt: skip
