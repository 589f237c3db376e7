"""Templates and tokenizers of strangers: whatever they do ends in one line that names the record, in bounded time."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.data.chat.encode import ChatEncoder
from hetero_megatron.data.chat.packed import encoded_records
from hetero_megatron.data.chat.records import find_records
from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.guard import RENDER, CallLimits, Guard
from hetero_megatron.data.tokenize import encode_texts, tokenize
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError
from tests.support.chat import TEMPLATES, chat_tokenizer, turns

MARKED = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
REFUSED = {
    "{{ 1/0 }}": "division by zero",
    "{{ '\\ud800' }}": "half of a surrogate pair",
    "{{ 2.0 ** 99999 }}": "out of range",
    "{{ '%d' % 'x' }}": "format",
    "{{ 'a'.encode('nope') }}": "unknown encoding",
    "{{ 'x' * 10 ** 10 }}": "more memory",
    "{{ 'a'.center(10 ** 10) }}": "more memory",
    "{{ messages | tojson(indent=10 ** 10) }}": "",
    "{{ 'x' * 10 ** 7 }}": "makes 10,000",
    "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(900) }}": "recursion",
    "{{ " + "(" * 400 + "1" + ")" * 400 + " }}": "",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception('no') }}": ": no.",
    "{% include 'other' %}": "no loader",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["chatml"])
    (folder / "c.jsonl").write_text(json.dumps({"messages": turns("aaa", "the fox says aaa")}) + "\n")
    return folder


def ids_of(folder: Path, encoder: ChatEncoder) -> list[int]:
    [(encoded, _)] = encoded_records(find_records(str(folder / "c.jsonl"), "--data-path"), encoder, None)
    return [int(i) for i in encoded.ids]


@pytest.fixture
def high_recursion_limit() -> Iterator[None]:
    """As a library may leave it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("high_recursion_limit")
def test_templates_that_raise_or_grow_are_refused_with_their_name_and_the_record(folder: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(folder))
    for text, says in REFUSED.items():
        with pytest.raises(UserError, match=r"^.*/c\.jsonl:1: --chat-template = t\.jinja: ") as caught:
            ids_of(folder, ChatEncoder(tokenizer, text + MARKED, "t.jinja"))
        assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_without_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_megatron.data.guard.SECONDS_PER_MB", 0.0)
    monkeypatch.setattr(Guard.__init__, "__defaults__", (0.3, 1 << 30))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    encoder = ChatEncoder(HuggingFaceTokenizer(str(folder)), endless + MARKED, "t.jinja")
    with pytest.raises(UserError, match=r"c\.jsonl:1: --chat-template = t\.jinja: .* takes more than 0\.3 s"):
        ids_of(folder, encoder)
    with pytest.raises(UserError, match="prompt 0.*the chat template takes more"):
        encoder.prompts([turns("a")])


def tokenizer_with(folder: Path, target: Path, **changes: Any) -> HuggingFaceTokenizer:
    chat_tokenizer(target, TEMPLATES["chatml"])
    found = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**found, **changes}))
    return HuggingFaceTokenizer(str(target))


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def test_tokenizers_that_expand_or_do_not_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_megatron.data.guard.SECONDS_PER_MB", 0.0)
    monkeypatch.setattr(Guard.__init__, "__defaults__", (0.5, 1 << 30))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "fox"}) + "\n" + json.dumps({"text": "a" * 60 + "!"}) + "\n")
    twice = {"type": "Sequence", "normalizers": [replace("aa")] * 40}
    for name, normalizer in {"twice": twice, "long": replace("b" * 10**6)}.items():
        tokenizer = tokenizer_with(folder, tmp_path / name, normalizer=normalizer)
        with pytest.raises(UserError, match=r"c\.jsonl:1: tokenizer = .*the tokenizer .* for this text"):
            ids_of(folder, ChatEncoder(tokenizer))
        with pytest.raises(UserError, match=r"c\.jsonl:2: tokenizer = .*the tokenizer .* for this text"):
            tokenize(find_corpus(str(tmp_path / "c.jsonl")), tokenizer, str(tmp_path / "cache"), lambda _: None)
        with pytest.raises(UserError, match="the tokenizer .* for this text"):
            encode_texts(["a" * 60], tokenizer)
    tokenizer = tokenizer_with(folder, tmp_path / "more", normalizer=replace("b" * 2000))
    with pytest.raises(UserError, match=r"makes [\d,]+ tokens of 61 characters"):
        encode_texts(["a" * 60 + "!"], tokenizer)
    assert not list((tmp_path / "cache").glob("*.tmp*"))
    with pytest.raises(UserError, match="decoder makes text up to"):
        tokenizer_with(folder, tmp_path / "d", decoder={"type": "Sequence", "decoders": [replace("aa")] * 40})


def test_loading_a_tokenizer_has_limits(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_megatron.data.tokenizer_files._LOAD_SECONDS", 0.5)
    token = {"id": 329, "content": "aXa", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    doubled = {"type": "Sequence", "normalizers": [replace("aa")] * 40}
    with pytest.raises(UserError, match="loading it takes more than 0.5 s"):
        tokenizer_with(folder, tmp_path / "t", normalizer=doubled, added_tokens=[{**token, "special": False}])


def doubled(item: int, limits: CallLimits) -> np.ndarray:
    limits.begin(RENDER)
    if item == 70:
        os.kill(os.getpid(), signal.SIGSEGV)
    limits.end()
    return np.full(item % 5, 2 * item)


def test_results_come_in_order_and_what_is_read_before_an_error_is_used() -> None:
    def items(count: int, end: Exception | None) -> Any:
        yield from range(count)
        if end is not None:
            raise end

    refuse = lambda item, call, why: UserError(f"{call} {why}", where=f"item {item}")  # noqa: E731
    found = list(Guard(doubled, refuse).map(items(70, None)))
    assert [item for item, _ in found] == list(range(70))
    assert all(np.array_equal(array, np.full(item % 5, 2 * item)) for item, array in found)
    seen = []
    with pytest.raises(UserError, match="cut off"):
        for item, _ in Guard(doubled, refuse).map(items(50, UserError("cut off"))):
            seen.append(item)
    assert seen == list(range(50))
    with pytest.raises(UserError, match="item 70: the chat template .*SIGSEGV"):
        list(Guard(doubled, refuse).map(range(100)))
    assert Guard(doubled, refuse).run([1, 2])[1].tolist() == [4, 4]  # type: ignore[union-attr]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UserError, match="nested too deeply"):
        list(Guard(lambda item, _: 0, lambda item, call, why: UserError(why)).map([1, deep]))


def test_a_child_ends_with_its_parent_and_keeps_no_file_of_it() -> None:
    read, write = os.pipe()

    def work(item: int, limits: CallLimits) -> list[int]:
        return [os.getpid(), len(os.listdir("/proc/self/fd"))]

    reader = Guard(work, lambda item, call, why: UserError(why)).map(range(1000))
    _, (pid, files) = next(reader)
    os.close(write)
    assert os.read(read, 1) == b"" and files <= 5  # no other end is open
    os.close(read)
    reader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
