"""A small Llama with random weights, a larger one with the same tokenizer, and conversations, to try fine-tuning with.

    python examples/small_chat_model.py DIRECTORY    # base, larger, chats.jsonl, pairs.jsonl and labelled.jsonl in it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# ChatML; {% generation %} marks what the assistant writes, which is what counts in the loss.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COLOURS = ("red", "green", "blue", "black", "white")
THINGS = ("sky", "grass", "night", "snow", "rose", "sea", "coal", "leaf")


def main(root: Path) -> None:
    chats = [
        [{"role": "user", "content": f"What colour is the {thing}?"},
         {"role": "assistant", "content": f"The {thing} is {COLOURS[i % len(COLOURS)]}."}]
        for i, thing in enumerate(THINGS * 8)
    ]  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    (root / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    pairs = [{"chosen": chat, "rejected": [chat[0], {"role": "assistant", "content": "No idea."}]} for chat in chats]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    labelled = [{"prompt": pair["chosen"][:1], "completion": pair[side][1:], "label": side == "chosen"}
                for pair in pairs for side in ("chosen", "rejected")]  # fmt: skip
    (root / "labelled.jsonl").write_text("".join(json.dumps(record) + "\n" for record in labelled))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator([turn["content"] for chat in chats for turn in chat], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    for name, width in (("base", 64), ("larger", 128)):
        tokenizer.save_pretrained(root / name)
        config = LlamaConfig(
            vocab_size=512, hidden_size=width, intermediate_size=176, num_hidden_layers=width // 32,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(root / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
