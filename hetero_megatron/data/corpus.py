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

from hetero_megatron.data.folder import KEYED, folder_files, one_kind
from hetero_megatron.data.sources import arrow, jsonl, parquet, text
from hetero_megatron.data.sources.text import STDLIB, is_compressed, stdlib_files, uncompressed_name
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import POINTER, is_pointer
from hetero_megatron.utils.text import word

Cursor = tuple[int, ...]  # (file, *position in it); the empty tuple is the beginning
START: Cursor = ()

_READERS: dict[str, Callable[..., Iterator[tuple[str, tuple[int, ...]]]]] = {
    "text": text.read,
    "jsonl": jsonl.read,
    "parquet": parquet.read,
    "arrow": arrow.read,
    "stdlib": functools.partial(text.read, errors="replace"),
}
_CHECKS: dict[str, Callable[[Path, str], None]] = {
    "jsonl": jsonl.check_end, "parquet": parquet.check, "arrow": arrow.check,
}  # fmt: skip
_ACCEPTED = "stdlib, a .bin/.idx prefix, or a file, folder or glob of text, *.jsonl, *.parquet or *.arrow"


@dataclass(frozen=True)
class Corpus:
    """Attributes:
        name: as given on the command line.
        kind: text, jsonl, parquet, arrow or stdlib.
        key: key or column of the text.
        left_out: files of the folder that only describe the data."""

    name: str
    kind: str
    files: tuple[Path, ...]
    key: str = "text"
    left_out: tuple[Path, ...] = ()

    def notice(self) -> str | None:
        """What the user should know about the choice of files; None: nothing."""
        if not self.left_out:
            return None
        names = list(dict.fromkeys(file.name for file in self.left_out))
        rest_text = f" and {len(names) - 8} more" if len(names) > 8 else ""
        described = f"{word(len(names), 'file')} beside the data, not read"
        return f"data: {self.name}: {described}: {', '.join(names[:8])}{rest_text}"

    def documents(self, cursor: Cursor = START) -> Iterator[tuple[str, Cursor]]:
        """(text, cursor after it) from a cursor to the end of the last file; UserError for invalid content."""
        first, position = (cursor[0], cursor[1:]) if cursor else (0, ())
        for number in range(first, len(self.files)):
            for document, cursor_after in _READERS[self.kind](self.files[number], self.key, position):
                yield document, (number, *cursor_after)
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
        check = _CHECKS.get(self.kind)
        if check is None:
            return
        for file in self.files:
            check(file, self.key)

    def num_bytes(self) -> int:
        return self._starts[-1]


def is_indexed(path: str) -> bool:
    """Whether a path names a .bin/.idx pair. UserError if only one of the two exists."""
    prefix = indexed_prefix(path)
    has_files = [os.path.isfile(prefix + end) for end in (".idx", ".bin")]
    if any(has_files) and not all(has_files) and not os.path.exists(prefix):
        present, lack = (".idx", ".bin") if has_files[0] else (".bin", ".idx")
        raise UserError(
            f"there is {prefix}{present} but no {prefix}{lack}", field="--data-path", value=path, accepted="both files"
        )
    return all(has_files)


def may_have_keys(path: str) -> bool:
    """Whether documents of a path may have keys or columns; also True for paths that do not exist (yet)."""
    if path == STDLIB or is_indexed(path):
        return False
    return uncompressed_name(Path(path)).suffix.lower() in KEYED or not os.path.isfile(path)


def indexed_prefix(path: str) -> str:
    return path[:-4] if path.endswith((".bin", ".idx")) else path


def find_corpus(path: str, key: str = "text", field: str = "--data-path") -> Corpus:
    """The corpus of a path: the built-in corpus, a file, all files below a folder, or a glob, in sorted order."""
    if path == STDLIB:
        return Corpus(path, STDLIB, tuple(stdlib_files()), key)
    files, left_out = _files(path, field)
    kind = one_kind(files, path, field)
    if sum(f.stat().st_size for f in files) == 0:
        raise UserError("the corpus is empty (0 bytes)", field=field, value=path, accepted="files with text")
    for file in files:
        if file.stat().st_size < 1024 and is_pointer(file):
            raise UserError(POINTER, field=field, value=str(file), accepted="the data")
    return Corpus(path, kind, tuple(files), key, tuple(left_out))


def _files(path: str, field: str) -> tuple[list[Path], list[Path]]:
    """(data, files beside it that are left out)."""
    if not path:
        raise UserError("the path is empty", field=field, value=path, accepted=_ACCEPTED)
    target = Path(os.path.expanduser(path))  # unlike Path.expanduser, takes ~nobody for a plain name
    if os.path.isdir(target):
        return folder_files(target, field, _ACCEPTED)
    if os.path.isfile(target):  # unlike Path.is_file, False also for a name that is too long
        return [target], []
    if glob.has_magic(path):
        files = sorted(Path(f) for f in glob.glob(str(target), recursive=True) if os.path.isfile(f))
        if files:
            return files, []
        raise UserError("the glob matches no file", field=field, value=path, accepted=_ACCEPTED)
    raise UserError("no such file or folder", field=field, value=path, accepted=_ACCEPTED + _elsewhere(path))


def _elsewhere(path: str) -> str:
    """What to do about data that are not on this machine."""
    if "://" in path:
        return "; what is on another machine has to be downloaded first"
    if path.startswith("hub:"):
        name = path.removeprefix("hub:").partition(":")[0]
        return f"; hub: is for finetune only, hf download --repo-type dataset {name} --local-dir DIR makes a folder"
    return ""
