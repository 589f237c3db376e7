"""JSON lines -> Megatron's .bin/.idx, with the flags of Megatron's tool of the same name.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B --workers 8

Writes ``corpus_text_document.bin`` and ``.idx`` (one pair per key of --json-keys); train on them with
``--data-path corpus_text_document``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hetero_megatron.data.corpus import find_corpus
from hetero_megatron.data.indexed import IndexedWriter, token_dtype
from hetero_megatron.data.sources.jsonl import read_objects, text_of
from hetero_megatron.data.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from hetero_megatron.errors import UserError

_CHUNK = 64  # documents per task of a worker
_REFUSED = {  # Megatron's flags that this tool does not have, and what to do instead
    "--partitions": "--workers N (one output is written, whatever N)",
    "--keep-sequential-samples": "nothing: the order is always kept",
    "--split-sentences": "nothing: GPT models are trained on whole documents",
    "--keep-newlines": "nothing: newlines are always kept",
    "--lang": "nothing: it belongs to --split-sentences",
}

# One element per document: (where it was read, texts by key). Workers return token ids by key, or the error.
_Record = tuple[str, list[str]]
_Encoded = list[np.ndarray] | UserError


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; Megatron's others are refused by name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", required=True, help="a .jsonl file, a folder or a quoted glob of them")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys that hold text; one output each")
    parser.add_argument("--output-prefix", required=True, help="path of the output without _KEY_document.bin")
    parser.add_argument("--tokenizer-type", required=True, help=", ".join(TOKENIZER_TYPES))
    parser.add_argument("--tokenizer-model", help="directory or name of a Hugging Face tokenizer")
    parser.add_argument("--vocab-file", help="GPT2BPETokenizer: vocab.json")
    parser.add_argument("--merge-file", help="GPT2BPETokenizer: merges.txt")
    parser.add_argument("--vocab-size", type=int, help="NullTokenizer: number of ids")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument("--log-interval", type=int, default=10_000, help="documents between progress lines")
    arguments, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=")[0]
        raise UserError("not a flag of this tool", field=flag, accepted=_REFUSED.get(flag, "see --help"))
    for flag, value in (("--workers", arguments.workers), ("--log-interval", arguments.log_interval)):
        if value < 1:
            raise UserError("must be positive", field=flag, value=value, accepted="an integer >= 1")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Write the outputs; UserError for bad input, and then no output appears."""
    tokenizer = _tokenizer(arguments)
    corpus = find_corpus(arguments.input, field="--input")
    if corpus.kind != "jsonl":
        raise UserError(
            f"holds {corpus.kind} files", field="--input", value=arguments.input,
            accepted="*.jsonl; other files need no preprocessing: give them to --data-path",
        )  # fmt: skip
    folder = Path(arguments.output_prefix).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError("no folder that can be written", field="--output-prefix", value=str(folder))
    records = (
        (f"{path}:{number}", [text_of(record, key, f"{path}:{number}") for key in arguments.json_keys])
        for path in corpus.files
        for number, record, _ in read_objects(path)
    )
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in arguments.json_keys]
    count = empty = tokens = 0
    began = time.monotonic()
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        for encoded in _encode_all(records, arguments, tokenizer):
            if isinstance(encoded, UserError):
                raise encoded
            for writer, ids in zip(writers, encoded):
                if len(ids):
                    writer.add(ids)
                    tokens += len(ids)
                else:
                    empty += 1
            count += 1
            if count % arguments.log_interval == 0:
                rate = count / (time.monotonic() - began)
                print(f"{count:,} documents, {tokens:,} tokens, {rate:,.0f} documents/s", flush=True)
        if not tokens:
            raise UserError("the corpus is empty (no text)", field="--input", value=arguments.input)
    left_out = f", {empty:,} empty ones left out" if empty else ""
    print(f"wrote {count:,} documents, {tokens:,} tokens ({np.dtype(dtype).name}){left_out}: {' '.join(prefixes)}")


def _encode_all(records: Iterator[_Record], arguments: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[_Encoded]:
    chunks = iter(lambda: list(itertools.islice(records, _CHUNK)), [])
    if arguments.workers == 1:
        for chunk in chunks:
            yield from _encode(chunk, tokenizer, arguments.append_eod)
        return
    # Spawned, not forked: tokenizers have threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.workers, _start_worker, (arguments,)) as pool:
        for part in pool.imap(_work, _throttled(chunks, 4 * arguments.workers, done := [0])):
            done[0] += 1
            yield from part


def _throttled(chunks: Iterator[list[_Record]], ahead: int, done: list[int]) -> Iterator[list[_Record]]:
    """Chunks, at most ``ahead`` more than are done: imap's feeder thread would read the whole input into memory."""
    for given, chunk in enumerate(chunks):
        while given - done[0] >= ahead:
            time.sleep(0.001)
        yield chunk


_worker: dict[str, tuple[Tokenizer, bool]] = {}  # of a worker process, set once at its start


def _start_worker(arguments: argparse.Namespace) -> None:
    _worker["state"] = (_tokenizer(arguments), arguments.append_eod)


def _work(chunk: list[_Record]) -> list[_Encoded]:
    return _encode(chunk, *_worker["state"])


def _encode(chunk: list[_Record], tokenizer: Tokenizer, append_eod: bool) -> list[_Encoded]:
    """Token ids of each text; an empty text stays empty, as in Megatron."""
    out: list[_Encoded] = []
    for where, texts in chunk:
        try:
            ids = [np.asarray(tokenizer.encode(text), dtype=np.int64) for text in texts]
        except UserError as error:
            out.append(UserError(str(error), where=where))
            continue
        out.append([np.append(i, tokenizer.eod) if append_eod and len(i) else i for i in ids])
    return out


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    return build_tokenizer(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_file, arguments.merge_file,
        arguments.vocab_size, arguments.trust_remote_code,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 2 and one message for bad input."""
    try:
        run(parse_arguments(words))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
