"""``hetero-megatron preprocess``: JSON lines -> .bin/.idx, with the flags of Megatron's tools/preprocess_data.py.

    hetero-megatron preprocess --input corpus.jsonl --output-prefix corpus --append-eod \
        --tokenizer-model meta-llama/Llama-3.1-8B --workers 8

Writes ``corpus_text_document.bin`` and ``.idx`` (one pair per key of --json-keys); train on them with
``--data-path corpus_text_document``.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hetero_megatron.cli.arguments import ArgumentParser, count
from hetero_megatron.data.config import TOKENIZER_TYPES, build_tokenizer, choose_type
from hetero_megatron.data.corpus import Corpus, find_corpus
from hetero_megatron.data.guard import UNLIMITED, CallLimits, Guard
from hetero_megatron.data.indexed import IndexedWriter, token_dtype
from hetero_megatron.data.sources.jsonl import read_objects, text_of
from hetero_megatron.data.tokenizers import Tokenizer, is_foreign, notices_of, required_eod, too_costly, with_end
from hetero_megatron.errors import UserError
from hetero_megatron.utils.outputs import try_folder
from hetero_megatron.utils.text import format_seconds, notice_line, plural, word

_CHUNK = 64  # documents per task of a worker
_REPORT_SECONDS = 5.0
_REFUSED = {  # Megatron's flags that this tool does not have, and what to do instead
    "--partitions": "--workers N (one output is written, whatever N)",
    "--keep-sequential-samples": "nothing: the order is always kept",
    "--split-sentences": "nothing: GPT models are trained on whole documents",
    "--keep-newlines": "nothing: newlines are always kept",
    "--lang": "nothing: it belongs to --split-sentences",
}

# One element per document: (where it was read, bytes read up to its end, texts by key), and (these bytes, token ids).
_Record = tuple[str, int, list[str]]
_Encoded = tuple[int, list[np.ndarray]]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; Megatron's others are refused by name."""
    parser = ArgumentParser("preprocess", "Tokenize JSON lines once: Megatron's .bin/.idx for --data-path.")
    add = parser.add_argument_group("data").add_argument
    add("--input", required=True, metavar="PATH", help="a .jsonl (.jsonl.gz) file, a folder or a quoted glob of them")
    add("--output-prefix", required=True, metavar="PATH", help="path of the output without _KEY_document.bin")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text; one output each (text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-model", metavar="NAME", help="directory or name of a Hugging Face tokenizer")
    add("--tokenizer-type", metavar="TYPE", help=f"{', '.join(TOKENIZER_TYPES)}; by the files given if left out")
    add("--vocab-file", metavar="FILE", help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=count(1, 2**31 - 2), metavar="N", help="NullTokenizer: number of ids")
    add("--trust-remote-code", action="store_true", help="run code that comes with a tokenizer")
    add = parser.add_argument_group("running").add_argument
    add("--workers", type=count(1, 1 << 12), default=1, metavar="N", help="processes that tokenize (1)")
    add(
        "--log-interval", type=count(), default=10_000, metavar="N",
        help="without a terminal: documents between progress lines, besides one every 5 s (10000)",
    )  # fmt: skip
    arguments, unknown = parser.parse_known_args(words)
    for extra in unknown:
        flag = extra.split("=")[0]
        raise UserError("not a flag of this tool", field=flag, accepted=_REFUSED.get(flag, "see --help"))
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        keys_text = " ".join(arguments.json_keys)
        raise UserError("a key stands twice", field="--json-keys", value=keys_text, accepted="each key once")
    tokenizer_type = choose_type(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_file, arguments.merge_file
    )
    if tokenizer_type is None:
        raise UserError("missing", field="--tokenizer-type", accepted=", ".join(TOKENIZER_TYPES))
    if arguments.vocab_size is not None and tokenizer_type != "NullTokenizer":
        problem = f"{tokenizer_type} does not read it"
        raise UserError(problem, field="--vocab-size", value=arguments.vocab_size, accepted="leave the flag out")
    arguments.tokenizer_type = tokenizer_type
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Write the outputs; UserError for bad input, and then no output appears."""
    tokenizer = _tokenizer(arguments)
    for said in notices_of(tokenizer):
        print(notice_line(said), file=sys.stderr)
    if arguments.append_eod:
        required_eod(tokenizer, "--append-eod ends documents with it")
    corpus = find_corpus(arguments.input, field="--input")
    if corpus.kind != "jsonl":
        raise UserError(
            f"holds {corpus.kind} files", field="--input", value=arguments.input,
            accepted="*.jsonl; other files need no preprocessing: give them to --data-path",
        )  # fmt: skip
    if notice := corpus.notice():
        print(notice)
    folder = Path(arguments.output_prefix).resolve().parent
    if not folder.is_dir():
        raise UserError("no folder that can be written", field="--output-prefix", value=str(folder))
    try_folder(str(folder), "--output-prefix")
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in arguments.json_keys]
    counts = Counts(corpus.num_bytes(), arguments.log_interval)
    with ExitStack() as stack:
        stack.enter_context(counts)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype, "--output-prefix")) for prefix in prefixes]
        for bytes_done, encoded in _encode_all(_records(corpus, arguments.json_keys), arguments, tokenizer):
            for writer, ids in zip(writers, encoded):
                if len(ids):
                    writer.add(ids)
            counts.add([len(ids) for ids in encoded], bytes_done)
        if not counts.tokens:
            raise UserError("the corpus is empty (no text)", field="--input", value=arguments.input)
    print(f"wrote {counts.summary(len(prefixes))} ({np.dtype(dtype).name}): {' '.join(prefixes)}")


class Counts:
    """What was read and written so far; shows a progress bar on a terminal, else lines by time and by documents.

    Attributes:
        read: lines; written, empty: documents of all outputs together; tokens: of them.
    """

    def __init__(self, total_bytes: int, interval: int) -> None:
        self.read = self.written = self.empty = self.tokens = 0
        self._total, self._interval = total_bytes, interval
        self._began = self._last = time.monotonic()
        console = Console(stderr=True)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task("", total=total_bytes) if self._bar is not None else None

    def __enter__(self) -> Counts:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, lengths: Sequence[int], done: int) -> None:
        """A line was read, with texts of so many tokens; ``done``: bytes of the input read by then."""
        self.read += 1
        self.written += sum(n > 0 for n in lengths)
        self.empty += sum(n == 0 for n in lengths)
        self.tokens += sum(lengths)
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            progress = f"{plural(self.read, 'document')}, {plural(self.tokens, 'token')}"
            self._bar.update(self._task, completed=done, description=progress)
            return
        if self.read % self._interval == 0 or now - self._last >= _REPORT_SECONDS:
            self._last = now
            print(self.progress(done, now - self._began), flush=True)

    def progress(self, done: int, seconds: float) -> str:
        """A line with the share that is done and the time that is left at this pace."""
        share = min(1.0, done / max(1, self._total))
        time_left = format_seconds(seconds * (1 / share - 1)) if share > 0 else "unknown"
        rate = plural(round(self.read / max(seconds, 1e-9)), "document")
        return (
            f"{share:.0%} read: {plural(self.read, 'document')}, {plural(self.tokens, 'token')}, {rate}/s, "
            f"{format_seconds(seconds)} so far, ETA {time_left}"
        )

    def summary(self, outputs: int) -> str:
        """What is in the outputs."""
        outputs_text = f" in {outputs} outputs" if outputs > 1 else ""
        left_out = f", {self.empty:,} empty {word(self.empty, 'one')} left out" if self.empty else ""
        return f"{plural(self.written, 'document')}{outputs_text}{left_out}, {plural(self.tokens, 'token')}"


def _records(corpus: Corpus, keys: Sequence[str]) -> Iterator[_Record]:
    for file, path in enumerate(corpus.files):
        for number, record, position in read_objects(path):
            place = f"{path}:{number}"
            yield place, corpus.bytes_before((file, *position)), [text_of(record, key, place) for key in keys]


def _encode_all(
    records: Iterator[_Record], arguments: argparse.Namespace, tokenizer: Tokenizer
) -> Iterator[_Encoded]:
    """(bytes read by then, token ids) of each document, in order."""
    encoder = _Encoder(tokenizer, arguments.append_eod)
    if arguments.workers == 1:
        yield from encoder.map(records)
        return
    chunks = iter(lambda: list(itertools.islice(records, _CHUNK)), [])
    # Spawned, not forked: tokenizers have threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.workers, _start_worker, (arguments,)) as pool:
        for part in pool.imap(_work, _throttled(chunks, 4 * arguments.workers, parts_done := [0])):
            parts_done[0] += 1
            for encoded in part:
                if isinstance(encoded, UserError):
                    raise encoded
                yield encoded


def _throttled(chunks: Iterator[list[_Record]], ahead: int, done: list[int]) -> Iterator[list[_Record]]:
    """Chunks, at most ``ahead`` more than are done: imap's feeder thread would read the whole input into memory."""
    for chunks_given, chunk in enumerate(chunks):
        while chunks_given - done[0] >= ahead:
            time.sleep(0.001)
        yield chunk


class _Encoder:
    """Token ids of each text, empty ones of an empty text, as in Megatron; foreign tokenizers have a process with
    limits (see ``data.guard``)."""

    def __init__(self, tokenizer: Tokenizer, append_eod: bool) -> None:
        self._tokenizer, self._eod = tokenizer, tokenizer.eod if append_eod else None
        self._guard = Guard(self._encode, self._refuse) if is_foreign(tokenizer) else None

    def map(self, records: Iterator[_Record]) -> Iterator[_Encoded]:
        """Of all records, in order. UserError: of the first that cannot be encoded."""
        if self._guard is None:
            return ((record[1], self._encode(record)) for record in records)
        return ((record[1], ids) for record, ids in self._guard.map(records))

    def run(self, chunk: list[_Record]) -> list[_Encoded | UserError]:
        """Of a few records, up to an error."""
        out: list[_Encoded | UserError] = []
        if self._guard is not None:
            for (_, bytes_done, _), encoded in zip(chunk, self._guard.run(chunk)):  # an error is the last answer
                out.append(encoded if isinstance(encoded, UserError) else (bytes_done, encoded))
            return out
        try:
            out += self.map(iter(chunk))
        except UserError as error:
            out.append(error)
        return out

    def _encode(self, record: _Record, limits: CallLimits = UNLIMITED) -> list[np.ndarray]:
        place, _, texts = record
        try:
            ids = [np.asarray(self._tokenizer.encode(text, limits), dtype=np.int64) for text in texts]
        except UserError as error:
            raise UserError(str(error), where=place) from None
        return [with_end(i, self._eod) if len(i) and self._eod is not None else i for i in ids]

    def _refuse(self, record: _Record, _: str, why: str) -> UserError:
        return too_costly(self._tokenizer.name, why, record[0])


_worker: dict[str, _Encoder] = {}  # of a worker process, set once at its start


def _start_worker(arguments: argparse.Namespace) -> None:
    _worker["state"] = _Encoder(_tokenizer(arguments), arguments.append_eod)


def _work(chunk: list[_Record]) -> list[_Encoded | UserError]:
    return _worker["state"].run(chunk)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    return build_tokenizer(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_file, arguments.merge_file,
        arguments.vocab_size, arguments.trust_remote_code,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Write .bin/.idx; UserError for bad input."""
    try:
        run(parse_arguments(words))
    except OSError as error:  # the disk is full, a folder went away
        raise UserError(f"cannot be written: {error.strerror}", field="--output-prefix") from None
    return 0


def program(words: Sequence[str] | None = None) -> int:
    """``tools/preprocess_data.py``: as :func:`main`, with exit code 2 and one message for bad input."""
    try:
        return main(words)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
