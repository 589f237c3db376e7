"""Sums of digits to learn by GRPO: a tiny model with random weights, prompts such as "3+4=", and what judges answers.

    python examples/grpo_sums.py DIRECTORY    # base and prompts.jsonl in it; the reward is examples/grpo_sums.py:right
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def right(completions: list[str], total: list[int], **others: object) -> list[float]:
    """1 for the right number, a little for another one.

    Called as TRL calls reward functions: each argument is a list with an entry for each answer; ``total`` is a column
    of prompts.jsonl.
    """
    return [1.0 if text == str(number) else 0.1 * text.isdecimal() for text, number in zip(completions, total)]


def main(root: Path) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [*"0123456789+=", "<end>"]
    single = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    single.pre_tokenizer, single.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=single, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(root / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "base")
    records = [{"prompt": f"{a}+{b}=", "total": a + b} for a in range(5) for b in range(5)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
