"""Flags about fine-tuning: conversations, and what of them counts."""

from hetero_megatron.cli.flag import count, needs, switch, value
from hetero_megatron.data.chat.overlong import POLICIES

_SFT = needs("--sft")

FLAGS = (
    switch(
        "--sft", "the data are conversations (messages, ShareGPT, or prompt and completion) in *.jsonl, *.json, "
        "*.parquet or hub:NAME; hetero-megatron finetune sets it",
    ),
    value(
        "--chat-template", str, None, "file with a Jinja template, instead of the tokenizer's own", needs=_SFT,
    ),
    value(
        "--sft-loss", str, "assistant", "what counts in the loss: what the assistant wrote, or all of a conversation",
        choices=("assistant", "all"), needs=_SFT,
    ),
    value(
        "--overlong-samples", str, "keep-start", "conversations longer than --seq-length: cut at their end or start, "
        "left out, or refused; the run says how many there were",
        choices=POLICIES, needs=_SFT,
    ),
    switch("--no-packing", "every conversation has a sample of its own, filled with padding", needs=_SFT),
    count(
        "--shuffle-buffer", 1000, "conversations of a stream that are shuffled together",
        most=10**7, needs=needs("--dataloader-type streaming"),
    ),
)  # fmt: skip
