"""Records of fine-tuning data: jsonl, a JSON array, parquet, Arrow, or a data set of the Hugging Face hub."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hetero_megatron.data.chat.keys import RECORD_READ
from hetero_megatron.data.corpus import Corpus, find_corpus
from hetero_megatron.data.sources import arrow, jsonl, parquet
from hetero_megatron.data.sources.structure import feature_converter, json_values
from hetero_megatron.data.sources.text import open_content
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import MAX_TEXT_BYTES

HUB = "hub:"
_NAME = re.compile(r"hub:(?P<name>[^:]+)(:(?P<config>[^:]+))?(:(?P<split>[^:]+))?")
_HUB_ACCEPTED = "hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT"
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-]+(\.[0-9][\w-]*)*")  # the last part without a suffix
_ROWS = {"parquet": parquet.read_rows, "arrow": arrow.read_rows}
_ARRAY_BYTES = 16 * MAX_TEXT_BYTES


class Record(NamedTuple):
    """``where``: file and line, or data set and row, for messages."""

    value: Mapping[str, Any]
    where: str


class RecordSource(Protocol):
    """A data set.

    Attributes:
        name: as given on the command line; identity: changes when the content does; num_bytes: about how much it is.
        notice: what the user should know about the choice of files, or None.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def notice(self) -> str | None: ...

    def read(self, skip: int = 0) -> Iterator[Record]:
        """All records in order, without the first ``skip``."""
        ...


def find_records(path: str, field: str, streaming: bool = False) -> RecordSource:
    """The data set of a path, glob or folder, or ``hub:NAME``.

    Args:
        streaming: a data set of the hub is read as it comes, not downloaded first.
    """
    if path.startswith(HUB):
        return HubRecords(path, field, streaming)
    if _ON_HUB.fullmatch(path) and not os.path.lexists(path):
        accepted = f"a path, or hub:{path} for a data set of the Hugging Face hub"
        raise UserError("no such file or folder", field=field, value=path, accepted=accepted)
    corpus = find_corpus(path, field=field)
    if corpus.kind not in ("jsonl", *_ROWS):
        raise UserError(
            f"holds {corpus.kind} files", field=field, value=path,
            accepted="conversations: *.jsonl, *.json, *.parquet, *.arrow, or hub:NAME",
        )  # fmt: skip
    return FileRecords(corpus, field)


@dataclass(frozen=True)
class FileRecords:
    corpus: Corpus
    field: str

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def identity(self) -> str:
        return self.corpus.identity()

    @property
    def num_bytes(self) -> int:
        return self.corpus.num_bytes()

    @property
    def notice(self) -> str | None:
        return self.corpus.notice()

    def read(self, skip: int = 0) -> Iterator[Record]:
        return itertools.islice(self._all(), skip, None)

    def _all(self) -> Iterator[Record]:
        for path in self.corpus.files:
            if self.corpus.kind in _ROWS:
                for row, value in enumerate(_ROWS[self.corpus.kind](path)):
                    row_name = f"{path}: row {row}"
                    yield Record(json_values(value, RECORD_READ, row_name), row_name)
            elif _is_array(path, self.field):
                yield from _array(path, self.field)
            else:
                for number, value, _ in jsonl.read_objects(path, exact=True):
                    yield Record(value, f"{path}:{number}")


def _is_array(path: Path, field: str) -> bool:
    """Whether a JSON file is one list of objects, as ShareGPT data come."""
    with open_content(path, field) as file:
        return file.read(4096).removeprefix(jsonl.MARK).lstrip()[:1] == b"["


def _array(path: Path, field: str) -> Iterator[Record]:
    if path.stat().st_size > _ARRAY_BYTES:
        problem = f"a JSON list of more than {_ARRAY_BYTES >> 30} GiB"
        raise UserError(problem, field=field, value=str(path), accepted="one object per line (jsonl)")
    try:
        with open_content(path, field) as file:
            text = file.read(_ARRAY_BYTES + 1).removeprefix(jsonl.MARK).decode()
        values = json.loads(text, parse_int=jsonl.exact_integer)
    except UserError as error:
        raise UserError(error.problem, field=field, value=str(path), accepted=error.accepted) from None
    except (ValueError, RecursionError):
        problem = "is not JSON, or cut off"
        raise UserError(problem, field=field, value=str(path), accepted="a JSON list of objects") from None
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise UserError("is not an object", field=f"[{i}]", value=json.dumps(value)[:80], where=str(path))
        yield Record(value, f"{path}[{i}]")


@dataclass
class HubRecords:
    """``hub:NAME[:CONFIG][:SPLIT]`` by ``datasets``; NAME may also be a local folder that ``datasets`` reads."""

    name: str
    field: str
    streaming: bool
    notice: str | None = None
    _data: Any = None

    def __post_init__(self) -> None:
        parts = _NAME.fullmatch(self.name)
        if parts is None:
            raise UserError("not the name of a data set", field=self.field, value=self.name, accepted=_HUB_ACCEPTED)
        name, config, split = parts["name"], parts["config"], parts["split"]
        if config is not None and split is None:
            config, split = None, config
        self._data = self._load(name, config, split or "train")

    def _load(self, name: str, config: str | None, split: str) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError(
                "data sets of the hub need the package datasets", field=self.field, value=self.name,
                accepted="pip install 'hetero-megatron[data]'",
            ) from None  # fmt: skip
        bar_enabled = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(name, config, split=split, streaming=self.streaming)
        except Exception as error:  # of many kinds: no such name, no network, no such split, damaged files
            message = " ".join(str(error).split())[:300]
            raise UserError(
                f"datasets cannot load it ({type(error).__name__}: {message})", field=self.field, value=self.name,
                accepted=f"{_HUB_ACCEPTED}; a name that this machine can download or has downloaded",
            ) from None  # fmt: skip
        finally:
            if bar_enabled:
                datasets.enable_progress_bars()

    @property
    def identity(self) -> str:
        return f"{self.name} {getattr(self._data, '_fingerprint', '')}"

    @property
    def num_bytes(self) -> int:
        info = getattr(self._data, "info", None)
        return int(getattr(info, "dataset_size", None) or 1 << 40)

    def read(self, skip: int = 0) -> Iterator[Record]:
        rows = iter(self._data.skip(skip))
        convert = feature_converter(getattr(self._data, "features", None))
        for number in itertools.count(skip):
            try:
                value = next(rows)
            except StopIteration:
                return
            except Exception as error:  # a download that breaks off, a damaged shard
                message = " ".join(str(error).split())[:200]
                raise UserError(
                    f"cannot be read at row {number} ({type(error).__name__}: {message})", field=self.field,
                    value=self.name, accepted="a data set that can be read to its end",
                ) from None  # fmt: skip
            row_name = f"{self.name}: row {number}"
            yield Record(json_values(convert(value, row_name), RECORD_READ, row_name), row_name)
