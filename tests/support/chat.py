"""Small tokenizers with the chat templates of well-known families, and conversations for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

TEXTS = [f"the quick brown fox {i} jumps over the lazy dog and says hello" for i in range(50)]
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "<think>", "</think>",
]  # fmt: skip

# In the manner of the families that they are named after, with marks around all that an answer adds to the text.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
        "{% elif m.role == 'user' %}{{ '[INST]' + ns.system + m.content + '[/INST]' }}{% set ns.system = '' %}"
        "{% elif m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ raise_exception('only user, assistant and system') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}"
        "{{ m.content | trim + '<end_of_turn>\n' }}{% endgeneration %}{% else %}"
        "{{ m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + eos_token + '\n' }}{% endgeneration %}{% else %}{{ m.content + eos_token + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}"
        "{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt else '' }}"
    ),
}
# As Qwen3's: what the assistant thought is left out once another turn follows.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def unmarked(template: str) -> str:
    return re.sub(r"\{% (end)?generation %\}", "", template)


def chat_tokenizer(folder: Path, template: str | None, vocab_size: int = 330) -> Path:
    """A byte-level BPE tokenizer with special tokens; its template is in chat_template.jinja."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(TEXTS, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of a user and an assistant in turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = [
    turns("hello fox", "the fox says hello"),
    turns("jump", "over the lazy dog ", "  again", "and again\n\nthe end"),
    turns("a", "b", "c", "d", "e", "f" * 40),
    turns("why?", "Ünïcödé — 你好 ok", "and", "1 + 1 = 2"),
    turns("no answer", "yes", "to the last question"),
]
