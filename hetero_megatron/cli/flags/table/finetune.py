"""Flags about fine-tuning: conversations, what of them counts, and what another model says of the data: a teacher, and
scores in a file."""

from hetero_megatron.cli.flags.flag import count, needs, switch, value
from hetero_megatron.data.config import OVERLONG
from hetero_megatron.spec.distillation import LOSSES as DISTILLATION_LOSSES
from hetero_megatron.spec.lora import BASE_DTYPES, FEW_BITS_TARGETS, LEAST_ALPHA, MAX_RANK, MOST_ALPHA, SITE_WORD
from hetero_megatron.spec.preference import LOSSES, UNPAIRED

_PAIRS = needs("--preference")
_GRPO = needs("--grpo")
_LABELS = needs(*(f"--preference {loss}" for loss in UNPAIRED))
_SFT, _LORA, _ADAPTERS = needs("--sft"), needs("--lora-rank"), needs("--lora-rank", "--load-adapter")

FLAGS = (
    switch(
        "--sft", "the data are conversations (messages, ShareGPT's conversations or conversation, prompt and "
        "completion, or Alpaca's instruction and output) in *.jsonl, *.json, *.parquet, *.arrow or hub:NAME; "
        "hetero-megatron finetune sets it",
    ),
    value(
        "--chat-template", str, None, "file with a Jinja template, or the name of one of the tokenizer's; the one that "
        "transformers chooses if left out", needs=_SFT,
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
        "--epochs", float, None, "instead of --train-iters: times through the data, in whole steps",
        least=1e-6, most=1e6, needs=_SFT,
    ),
    switch("--no-packing", "every conversation has a sample of its own, filled with padding", needs=_SFT),
    value(
        "--preference", str, None, "train on preference pairs with this loss: dpo is TRL's "
        "sigmoid, others have its names; orpo, simpo, cpo have no reference; kto and apo_zero_unpaired take answers "
        "with a label", choices=tuple(LOSSES),
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
    switch(
        "--grpo", "the data are prompts, to which each step samples answers that --reward-function judges (GRPO)",
        needs=_SFT,
    ),
    value(
        "--reward-function", str, None, "FILE.py:NAME, which judges answers, called as TRL calls one", needs=_GRPO,
    ),
    value(
        "--reward-timeout", float, 60.0, "seconds that a call of it may take", above=0.0, most=1e6, needs=_GRPO,
    ),
    count(
        "--grpo-group-size", 8, "answers to each prompt, which are compared with each other", least=2, most=1 << 16,
        differs="2 in Megatron; here TRL's", needs=_GRPO,
    ),
    count(
        "--grpo-prompts-per-step", None, "prompts of a step; if left out, --global-batch-size (answers) over "
        "--grpo-group-size", most=1 << 30, differs="32 in Megatron", needs=_GRPO,
    ),
    count(
        "--grpo-iterations", 1, "steps on the same answers, before others are sampled", most=1 << 16,
        differs="2 in Megatron; here TRL's", needs=_GRPO,
    ),
    value(
        "--grpo-clamp-eps-lower", float, 0.2, "the ratio of a token's probability to that when it was sampled counts "
        "down to 1 less this", least=0.0, most=1.0, differs="0.01 in Megatron; here TRL's", needs=_GRPO,
    ),
    value(
        "--grpo-clamp-eps-upper", float, 0.2, "and up to 1 and this", least=0.0, most=1e6,
        differs="0.01 in Megatron; here TRL's", needs=_GRPO,
    ),
    value(
        "--grpo-kl-beta", float, 0.0, "weight of the divergence from the reference, the base with adapters off; 0: "
        "there is none", least=0.0, most=1e6, differs="0.001 in Megatron; here TRL's", needs=_GRPO,
    ),
    switch(
        "--grpo-plain-kl", "the divergence of a token counts as it is, as in Megatron, not times its ratio (TRL's "
        "use_bias_correction_kl)", needs=needs("--grpo-kl-beta"),
    ),
    value(
        "--grpo-loss-type", str, "dapo", "what counts alike: each token of a step (dapo), each answer (grpo), each "
        "token over answers of --max-new-tokens (dr_grpo)", choices=("dapo", "grpo", "dr_grpo"), needs=_GRPO,
    ),
    value(
        "--grpo-scale-rewards", str, "group", "by whose deviation of rewards advantages are divided",
        choices=("group", "batch", "none"), needs=_GRPO,
    ),
    count("--max-new-tokens", 256, "most tokens of a sampled answer", most=1 << 20, needs=_GRPO),
    count(
        "--rollout-batch-size", 32, "answers that a pipeline samples at a time", most=1 << 20, needs=_GRPO,
    ),
    count(
        "--generator-sync-every", 1, "steps after which a generator on ranks of its own (roles: generator) gets the "
        "weights", most=1 << 30, needs=_GRPO,
    ),
    switch(
        "--generator-ahead", "it samples the next answers while the ranks that train learn from these, by weights "
        "that are a step older", needs=_GRPO,
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
        "--lora-targets", str, None, f"projections with an adapter ({', '.join(FEW_BITS_TARGETS)}, or modules "
        "of linear attention and of several projections, as peft names them), all-linear, or one regular expression "
        "over whole names of the model's modules; all linear layers if left out", nargs="+",
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


_TEACHER = needs("--teacher-hf", "--teacher-scores")

DISTILLATION = (
    value(
        "--teacher-hf", str, None, "Hugging Face directory of a teacher with the same vocabulary: it runs forward on "
        "the ranks that the plan has for it (roles: teacher), else on the student's, cut as the student, before each "
        "step, and the student learns its distribution of the next token",
    ),
    value(
        "--teacher-scores", str, None, "the same from a file that hetero-megatron score wrote over the same data: the "
        "teacher's likeliest tokens; --teacher-hf beside it only says whose they are to be",
    ),
    value(
        "--distill-loss", str, "forward_kl", "divergence of teacher and student: forward_kl is KL(teacher, student), "
        "reverse_kl the other way round, js the generalised Jensen-Shannon divergence", choices=DISTILLATION_LOSSES,
        needs=_TEACHER,
    ),
    value(
        "--distill-weight", float, 0.5, "of the divergence, times the squared temperature, in the loss; the labels' "
        "cross-entropy has the rest to 1", above=0.0, most=1.0, needs=_TEACHER,
    ),
    value(
        "--distill-temperature", float, 1.0, "by which the logits of both are divided in the divergence; of "
        "hetero-megatron score, of what is stored", above=0.0, most=1e3,
        needs=needs("--teacher-hf", "--teacher-scores", "--save-scores"),
    ),
    value(
        "--distill-js-beta", float, 0.5, "weight of the teacher in js", above=0.0, below=1.0,
        needs=needs("--distill-loss js"),
    ),
    value("--save-scores", str, None, "of hetero-megatron score: the file to write"),
    count(
        "--score-top-k", 64, "likeliest tokens of a position whose log-probabilities hetero-megatron score stores, or "
        "a teacher on ranks of its own sends", most=2**20, needs=needs("--save-scores", "--teacher-hf"),
    ),
)  # fmt: skip
