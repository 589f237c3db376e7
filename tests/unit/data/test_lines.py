"""Lines of jsonl and of prompts, byte order marks, and the one end of a document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from hetero_megatron.cli.preprocess import main as preprocess
from hetero_megatron.data.chat.conversation import read_conversation
from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.indexed import open_indexed
from hetero_megatron.data.sources import jsonl
from hetero_megatron.data.streaming import StreamingDataset
from hetero_megatron.data.tokenize import tokenize
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.utils.files import read_lines
from tests.support.chat import chat_tokenizer

BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    lines = [f"one{BREAKS}", "  two  ", "three\rfour", "\u3000", "five"]
    for end in ("\n", "\r\n"):
        for last in ("", end, end * 3, f"{end} {end}\t{end}"):
            path.write_bytes(b"\xef\xbb\xbf" + (end.join([*lines[:2], "", *lines[2:]]) + last).encode())
            assert read_lines(path) == lines
    values = [{"text": line} for line in lines]
    for end in ("\n", "\r\n"):
        for last in ("", end, end * 3, f"{end} {end}\t{end}"):
            text = end.join(json.dumps(value, ensure_ascii=False) for value in values) + last
            path.write_bytes(b"\xef\xbb\xbf" + text.encode())
            assert [value for _, value, _ in jsonl.read_objects(path)] == values
            jsonl.check_end(path, "text")


def added_ends(folder: Path, ends: int, begin: bool) -> Path:
    """A tokenizer that itself adds ends, and perhaps a begin, to each text."""
    chat_tokenizer(folder, None)
    made = AutoTokenizer.from_pretrained(folder)
    special = [("</s>", made.eos_token_id), ("<s>", made.bos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{'<s> ' if begin else ''}$A{' </s>' * ends}", special_tokens=special
    )
    made.save_pretrained(folder)
    return folder


def test_a_document_has_one_end_whoever_adds_it(tmp_path: Path) -> None:
    texts = [f"the fox {i}" for i in range(5)] + ["the fox</s>"]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for number, (ends, begin) in enumerate([(0, False), (1, False), (1, True), (2, True)]):
        folder = added_ends(tmp_path / str(number), ends, begin)
        tokenizer = HuggingFaceTokenizer(str(folder))
        plain = AutoTokenizer.from_pretrained(folder)
        end = plain.eos_token_id
        body = [plain(text.removesuffix("</s>"), add_special_tokens=False).input_ids for text in texts]
        want = [[*([plain.bos_token_id] if begin else []), *ids, end] for ids in body]
        corpus = find_corpus(str(tmp_path / "c.jsonl"))
        prefix = str(tmp_path / f"out{number}")
        words = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", prefix, "--tokenizer-model", str(folder)]
        assert preprocess([*words, "--append-eod"]) == 0
        assert documents(open_indexed(f"{prefix}_text_document")) == want
        assert documents(tokenize(corpus, tokenizer, str(tmp_path / "cache"), lambda _: None)) == want
        stream = StreamingDataset(corpus, tokenizer, 8)
        flat = [i for ids in want for i in ids]
        assert stream[0].tokens.tolist() == flat[:9] and stream[1].tokens.tolist() == flat[8:17]
        found = ChatEncoder(tokenizer).encode(read_conversation({"prompt": "the", "completion": " fox"}, "c:1"), "c:1")
        assert found.ids.tolist().count(end) == max(1, ends) and found.ids[-1] == end


def documents(store: Any) -> list[list[int]]:
    bounds = store.offsets.tolist()
    return [store.tokens[a:b].tolist() for a, b in zip(bounds, bounds[1:])]
