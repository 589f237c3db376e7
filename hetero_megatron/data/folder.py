"""Which files of a folder are data: all but those that data sets bring along, if they are of one kind and one split.

What is not clear is refused, with a path that says what is meant: a glob is taken as it is.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetero_megatron.data.sources.text import is_compressed, uncompressed_name
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_json_object

KEYED = {
    ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
_PACKED = (".zst", ".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4")
_UNPACK = {".zst": "; zstd -d unpacks it", ".zip": "; unzip unpacks it"}
_TABLES = {".csv": "", ".tsv": ', sep="\\t"'}
# Descriptions that data sets bring along. Those of the first line are never data, those of the second one not beside
# .arrow, the texts and pictures not beside files with keys: a folder of nothing but texts is all documents.
_INFOS = {"dataset_infos.json", "dataset_info.json"}
_SAVED = {"dataset_dict.json", "state.json"}
_TEXTS = re.compile(
    r"(readme|licen[cs]e|notice|copying|change_?log|citation|contributing|code_of_conduct|authors)([-_. ].*)?"
    r"|_success|_metadata|_common_metadata|(sha|md5)\w*sums?(\.txt)?", re.IGNORECASE,
)  # fmt: skip
_PICTURES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf"}
_SPLITS = {
    "train": "train", "training": "train", "validation": "valid", "valid": "valid", "val": "valid", "dev": "valid",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "trainset": "train", "trainingset": "train", "validationset": "valid", "valset": "valid", "devset": "valid",
    "testset": "test", "evalset": "test", "holdout": "test", "heldout": "test",
}  # fmt: skip
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")


def kind_of(path: Path, field: str) -> str:
    """text, table, jsonl, parquet or arrow, by suffix. UserError: archives, which are not read."""
    suffix = uncompressed_name(path).suffix.lower()
    if suffix in _PACKED or (suffix in (".parquet", ".arrow") and is_compressed(path)):
        raise UserError(
            f"{suffix} files are not unpacked here", field=field, value=str(path),
            accepted=f"what is in it, as it is or as .gz, .bz2 or .xz{_UNPACK.get(suffix, '')}",
        )  # fmt: skip
    return "table" if suffix in _TABLES else KEYED.get(suffix, "text")


def _refuse_table(path: Path, field: str) -> UserError:
    uncompressed = uncompressed_name(path)
    suffix = uncompressed.suffix.lower()
    return UserError(
        f"{suffix} files are tables, which are not read", field=field, value=str(path),
        accepted="*.jsonl or *.parquet; python -c 'import sys, pandas; "
        f"pandas.read_csv(sys.argv[1]{_TABLES[suffix]}).to_json(sys.argv[2], orient=\"records\", lines=True)' "
        f"{path} {uncompressed.with_suffix('.jsonl').name} makes one",
    )  # fmt: skip


def folder_files(folder: Path, field: str, accepted: str) -> tuple[list[Path], list[Path]]:
    """(data, side_files) of all files below a folder, in sorted order; hidden ones are neither.

    Args:
        accepted: for the refusal of a folder without data.

    Raises:
        UserError: no data, data of several splits, or a folder that cannot be read.
    """
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UserError("the folder cannot be read: permission denied", field=field, value=str(folder))
    files = sorted(f for f in folder.rglob("*") if f.is_file() and not _hidden(f.relative_to(folder)))
    side_files = _side_files(files)
    data = [f for f in files if f not in side_files]
    if not data:
        side_names = f" but {', '.join(sorted(f.name for f in side_files)[:3])}" if side_files else ""
        raise UserError(f"the folder holds no files{side_names}", field=field, value=str(folder), accepted=accepted)
    if pairs := [f.with_suffix("") for f in data if f.suffix == ".idx" and f.with_suffix(".bin") in data]:
        pairs_text = ", ".join(str(prefix) for prefix in pairs[:4]) + (" …" if len(pairs) > 4 else "")
        accepted = f"the prefix of a pair, or several, as a blend: {pairs_text}"
        raise UserError("holds pairs of .bin and .idx", field=field, value=str(folder), accepted=accepted)
    _refuse_splits(folder, data, field)
    return data, sorted(side_files)


def one_kind(files: Sequence[Path], path: str, field: str) -> str:
    """The kind of all files; tables among texts are texts. UserError: they are of several kinds, which are named, or
    nothing but tables."""
    kinds: dict[str, list[Path]] = {}
    for file in files:
        kinds.setdefault(kind_of(file, field), []).append(file)
    if kinds.keys() == {"table"}:
        raise _refuse_table(files[0], field)
    if kinds.keys() == {"table", "text"}:
        return "text"
    if len(kinds) == 1:
        return next(iter(kinds))
    kinds_text = "; ".join(f"{kind}: {_some(files_of_kind)}" for kind, files_of_kind in sorted(kinds.items()))
    first = next(files_of_kind[0] for kind, files_of_kind in sorted(kinds.items()) if kind in KEYED.values())
    parent = Path(path) if os.path.isdir(path) else first.parent
    raise UserError(
        f"holds files of several kinds ({kinds_text})", field=field, value=path,
        accepted=f"a glob that selects one kind, e.g. '{parent}/**/*{''.join(first.suffixes[-2:])}'",
    )  # fmt: skip


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _side_files(files: Iterable[Path]) -> set[Path]:
    suffixes = {f: uncompressed_name(f).suffix.lower() for f in files}
    side_files = {f for f in suffixes if f.name in _INFOS}
    if ".arrow" in suffixes.values():
        side_files |= {f for f in suffixes if f.name in _SAVED}
        side_files |= _cached([f for f, suffix in suffixes.items() if suffix == ".arrow"])
    if any(suffix in KEYED for f, suffix in suffixes.items() if f not in side_files):
        side_files |= {f for f, suffix in suffixes.items() if suffix not in KEYED and _TEXTS.fullmatch(f.name)}
        side_files |= {f for f, suffix in suffixes.items() if suffix in _PICTURES}
    return side_files


def _cached(files: Iterable[Path]) -> set[Path]:
    """The Arrow files that ``datasets`` left beside its data: results of map, filter and so on."""
    folders: dict[Path, list[Path]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(file)
    cached: set[Path] = set()
    for folder, siblings in folders.items():
        saved = _saved_names(folder / "state.json")
        if not any(f.name in saved for f in siblings):  # no save_to_disk, or one that cannot be read
            saved = {f.name for f in siblings if not f.name.startswith("cache-")}
        cached |= {f for f in siblings if f.name not in saved}
    return cached


def _saved_names(state: Path) -> set[str]:
    """Names of the data files that a state.json of save_to_disk lists; none if it is not there, or damaged."""
    try:
        return {Path(entry["filename"]).name for entry in read_json_object(state)["_data_files"]}
    except (UserError, KeyError, TypeError):
        return set()


def _refuse_splits(folder: Path, files: Sequence[Path], field: str) -> None:
    """Refuse a folder with data of several splits: trained on as a whole, the test data would be training data."""
    splits: dict[tuple[str, str], list[Path]] = {}
    unsplit = 0
    for file in files:
        split = _split(file.relative_to(folder))
        if split is not None:
            splits.setdefault(split, []).append(file)
        elif uncompressed_name(file).suffix.lower() not in KEYED:
            unsplit += 1  # texts may have any name: they are splits only if all of them are
    if len(splits) < 2 or unsplit:
        return
    splits_text = "; ".join(f"{name}: {_some(split_files)}" for (_, name), split_files in splits.items())
    paths = {split: _path_of(split_files, files, folder) for split, split_files in splits.items()}
    uses = [uses for uses, _ in splits]
    if field == "--data-path" and len(set(uses)) == len(uses):
        accepted = " ".join(f"--{use}-data-path {path}" for (use, _), path in sorted(paths.items(), key=_order))
        accepted += ", or a glob of all that is meant"
    else:
        accepted = f"one of {', '.join(path for _, path in sorted(paths.items(), key=_order))}, or a glob of them"
    raise UserError(f"holds data of several splits ({splits_text})", field=field, value=str(folder), accepted=accepted)


def _order(entry: tuple[tuple[str, str], str]) -> int:
    return ("train", "valid", "test").index(entry[0][0])


def _split(path: Path) -> tuple[str, str] | None:
    """(train, valid or test; its name) that a file's name says, or else the nearest folder's; None: nothing does.

    Shards are of a split by their whole name (``train_sft-00000-of-00003``).
    """
    stem = uncompressed_name(path).stem
    shard = _SHARD.fullmatch(stem)
    for i, part in enumerate([shard[1] if shard else stem, *reversed(path.parts[:-1])]):
        words = [word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", part.lower())]
        uses = [_SPLITS[word] for word in words if word in _SPLITS]
        if uses:
            return uses[0], part if shard and i == 0 else uses[0]
    return None


def _path_of(files: Sequence[Path], among: Sequence[Path], folder: Path) -> str:
    """A folder or a glob that selects ``files`` and no other, where a simple one does; else their paths."""
    parent = Path(os.path.commonpath([f.parent for f in files]))
    if parent != folder and [f for f in among if f.is_relative_to(parent)] == list(files):
        return f"'{parent}'"
    start = os.path.commonprefix([f.name for f in files])
    if len(files) == 1:
        return f"'{files[0]}'"
    for begin in (re.sub(r"[-_.\d]+$", "", start), start):
        if begin and [f for f in among if f.parent == parent and f.name.startswith(begin)] == list(files):
            return f"'{parent}/{begin}*'"
    name = glob.escape(start) + ("" if all(f.name == start for f in files) else "*")
    for last in ([name] if start else []) + [f"{glob.escape(files[0].parent.name)}/*"]:
        pattern = f"{glob.escape(str(folder))}/**/{last}"
        if sorted(Path(f) for f in glob.glob(pattern, recursive=True) if os.path.isfile(f)) == list(files):
            return f"'{pattern}'"
    rest_text = f" and {len(files) - 8:,} more" if len(files) > 8 else ""
    return " ".join(f"'{f}'" for f in files[:8]) + rest_text


def _some(files: Sequence[Path]) -> str:
    rest_text = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
    return f"{files[0].name}{rest_text}"
