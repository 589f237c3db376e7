"""A corpus is a list of files of one kind, read in order as documents; ``find_corpus`` resolves a path to one."""

from __future__ import annotations

import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.data.sources import jsonl, parquet, stdlib, text
from hetero_megatron.data.sources.compressed import is_compressed, uncompressed_name
from hetero_megatron.errors import UserError

Cursor = tuple[int, ...]  # (file, *position in it); the empty tuple is the beginning
START: Cursor = ()

_READERS: dict[str, Callable[..., Iterator[tuple[str, tuple[int, ...]]]]] = {
    "text": text.read,
    "jsonl": jsonl.read,
    "parquet": parquet.read,
    "stdlib": functools.partial(text.read, errors="replace"),
}
_KEYED = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_ACCEPTED = "stdlib, a .bin/.idx prefix, or a file, folder or glob of text, *.jsonl or *.parquet"


@dataclass(frozen=True)
class Corpus:
    """Attributes:
        name: as given on the command line.
        kind: text, jsonl, parquet or stdlib.
        key: key or column of the text."""

    name: str
    kind: str
    files: tuple[Path, ...]
    key: str = "text"

    def documents(self, cursor: Cursor = START) -> Iterator[tuple[str, Cursor]]:
        """(text, cursor after it) from a cursor to the end of the last file; UserError for invalid content."""
        first, position = (cursor[0], cursor[1:]) if cursor else (0, ())
        for number in range(first, len(self.files)):
            for document, after in _READERS[self.kind](self.files[number], self.key, position):
                yield document, (number, *after)
            position = ()

    def place(self, cursor: Cursor) -> str:
        """File and position of the document that ends at a cursor, for messages."""
        file, *position = cursor
        return f"{self.files[file]}:{position[-1]}" if self.kind == "jsonl" else str(self.files[file])

    def bytes_before(self, cursor: Cursor) -> int:
        """Bytes of the files that were read by then, as far as known: of a parquet or compressed file, none before its
        end."""
        file, *position = cursor
        within = position[0] if self.kind == "jsonl" and not is_compressed(self.files[file]) else 0
        return self._starts[file] + within

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((f.stat().st_size for f in self.files), initial=0))

    def identity(self) -> str:
        """A string that changes when a file does; part of cache keys."""
        stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]
        return json.dumps([self.kind, self.key, stats])

    def check_ends(self) -> None:
        """UserError for a file that is truncated at its end, which a stream would only notice on reaching it."""
        for file in self.files:
            if self.kind == "jsonl":
                jsonl.check_end(file, self.key)
            elif self.kind == "parquet":
                parquet.check(file, self.key)

    def num_bytes(self) -> int:
        return self._starts[-1]


def is_indexed(path: str) -> bool:
    """Whether a path names a .bin/.idx pair. UserError if only one of the two exists."""
    prefix = indexed_prefix(path)
    found = [os.path.isfile(prefix + end) for end in (".idx", ".bin")]
    if any(found) and not all(found) and not os.path.exists(prefix):
        have, lack = (".idx", ".bin") if found[0] else (".bin", ".idx")
        raise UserError(
            f"there is {prefix}{have} but no {prefix}{lack}", field="--data-path", value=path, accepted="both files"
        )
    return all(found)


def may_have_keys(path: str) -> bool:
    """Whether documents of a path may have keys or columns; also True for paths that do not exist (yet)."""
    if path == stdlib.NAME or is_indexed(path):
        return False
    return uncompressed_name(Path(path)).suffix in _KEYED or not os.path.isfile(path)


def indexed_prefix(path: str) -> str:
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def find_corpus(path: str, key: str = "text", field: str = "--data-path") -> Corpus:
    """The corpus of a path: the built-in corpus, a file, all files below a folder, or a glob, in sorted order."""
    if path == stdlib.NAME:
        return Corpus(path, "stdlib", tuple(stdlib.stdlib_files()), key)
    files = _files(path, field)
    kinds = {_kind(f) for f in files}
    if len(kinds) > 1:
        raise UserError(
            f"holds files of several kinds ({', '.join(sorted(kinds))})",
            field=field, value=path, accepted="a glob that selects one kind, e.g. 'folder/*.jsonl'",
        )  # fmt: skip
    if sum(f.stat().st_size for f in files) == 0:
        raise UserError("the corpus is empty (0 bytes)", field=field, value=path, accepted="files with text")
    return Corpus(path, kinds.pop(), tuple(files), key)


def _files(path: str, field: str) -> list[Path]:
    if not path:
        raise UserError("the path is empty", field=field, value=path, accepted=_ACCEPTED)
    target = Path(os.path.expanduser(path))  # unlike Path.expanduser, takes ~nobody for a plain name
    if os.path.isdir(target):
        if not os.access(target, os.R_OK | os.X_OK):
            raise UserError("the folder cannot be read: permission denied", field=field, value=path)
        files = sorted(f for f in target.rglob("*") if f.is_file() and not _hidden(f.relative_to(target)))
        if not files:
            raise UserError("the folder holds no files", field=field, value=path, accepted=_ACCEPTED)
        return files
    if os.path.isfile(target):  # unlike Path.is_file, False also for a name that is too long
        return [target]
    if glob.has_magic(path):
        files = sorted(Path(f) for f in glob.glob(str(target), recursive=True) if os.path.isfile(f))
        if files:
            return files
        raise UserError("the glob matches no file", field=field, value=path, accepted=_ACCEPTED)
    raise UserError("no such file or folder", field=field, value=path, accepted=_ACCEPTED)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    suffix = uncompressed_name(path).suffix
    if suffix in (".zst", ".zip", ".tar", ".tgz", ".7z") or (suffix == ".parquet" and is_compressed(path)):
        raise UserError(
            f"{suffix} files are not unpacked here", field="--data-path", value=str(path),
            accepted="what is in it, as it is or as .gz, .bz2 or .xz",
        )  # fmt: skip
    return _KEYED.get(suffix, "text")
