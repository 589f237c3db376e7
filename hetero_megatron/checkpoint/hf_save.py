"""Export of weights to a Hugging Face directory from any plan: headers first, then every rank writes the boxes it owns.

No rank gathers the model. Without a shared file system the first rank writes every file and receives one tensor at a
time from its owners. Files are written to ``DIRECTORY.incomplete``, which is renamed when complete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.companions import CONFIG, Companions, from_directory, is_tokenizer
from hetero_megatron.checkpoint.export_folder import check_work, make_work, publish_work, work_of
from hetero_megatron.checkpoint.finite import is_finite, listed
from hetero_megatron.checkpoint.hf_files import (
    DTYPES,
    SHARD_BYTES,
    StoredTensor,
    as_stored,
    bits,
    file_header,
    main_dtype,
    plan_files,
    put_box,
)
from hetero_megatron.checkpoint.names import name_table, stored_boxes
from hetero_megatron.comm import Group
from hetero_megatron.comm.refusals import together
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec, export_config, logical_tensors, to_hf_config
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.words import plural

Owned = tuple[str, Box, torch.Tensor]  # logical name, box, its values

FLAG = "--save-hf"


def save_hf(
    directory: str,
    spec: ModelSpec,
    owned: Iterable[Owned],
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    world: Group,
    source: str | Companions | None = None,
    shard_bytes: int = SHARD_BYTES,
    nonfinite: dict[str, None] | None = None,
) -> str:
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` loads. Called on all ranks of ``world``.

    Args:
        directory: on the first rank's node; on other nodes the same name may be another directory.
        owned: (logical name, box, values) of everything this rank owns; all ranks together own every element once.
        dtypes: of the files: of all tensors, or by logical name.
        source: files to copy along, as the first rank has them, or a Hugging Face directory to take them from.
        nonfinite: if given, weights that are NaN or Inf in the files' dtype are written and this rank's names are added
            to it; if None, they are rejected.

    Returns:
        A one-line summary, on all ranks.

    Raises:
        UserError: on all ranks: the directory is not empty or cannot be written, or weights are not finite; nothing is
            left behind.
    """
    first, final = world.index == 0, Path(directory)
    work, table = work_of(final), name_table(spec)
    logical = {tensor.name: tensor for tensor in logical_tensors(spec)}
    by_name = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(logical, dtypes)
    owned = _stored_pieces(owned, logical)
    plan, found = plan_files(spec, by_name, shard_bytes), dict[str, None]()
    world.comm.activity = f"writing {FLAG}"
    _together(world, lambda: _create(final, work, spec, plan, source) if first else None)
    if _all_see(work, world):
        _together(world, lambda: _write(work, table, owned, plan, found))
    else:
        _write_on_first(work, table, owned, plan, found, world)
    if nonfinite is not None:
        nonfinite |= found
    else:
        _require_finite(directory, work, found, world)
    return str(_together(world, lambda: _publish(final) if first else "", str)[0])


def _stored_pieces(owned: Iterable[Owned], logical: Mapping[str, LogicalTensor]) -> Iterator[Owned]:
    """The same values by the names and boxes of the tensors in files."""
    for name, box, values in owned:
        parts = list(stored_boxes(logical[name], box))
        for (stored, inside), value in zip(parts, values if len(box.lo) == 3 else [values], strict=True):
            yield stored.name, inside, value


def _require_finite(directory: str, work: Path, nonfinite: Iterable[str], world: Group) -> None:
    def check() -> None:
        if nonfinite:
            raise UserError(
                f"is not written: NaN or Inf in {listed(nonfinite)}", field=FLAG, value=directory,
                accepted="weights that are finite in the dtype of the files (--save-hf-dtype)",
            )  # fmt: skip

    try:
        _together(world, check)
    except UserError:
        if world.index == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _publish(final: Path) -> str:
    publish_work(final)
    files = [path for path in final.rglob("*") if path.is_file()]
    total, config = sum(path.stat().st_size for path in files), json.loads((final / CONFIG).read_text())
    tokenizer = "its tokenizer" if any(is_tokenizer(p.relative_to(final).as_posix()) for p in files) else "no tokenizer"
    counted = f"{plural(len(files), 'file')}, {plural(total, 'byte')}"
    return f"saved a Hugging Face {config['model_type']} model with {tokenizer} to {final}: {counted}"


def _together(world: Group, action: Callable[[], Any], kind: Any = NoneType) -> list[Any]:
    """Like :func:`~hetero_megatron.comm.refusals.together`, for actions that write."""

    def attempt() -> Any:
        try:
            return action()
        except OSError as error:
            text = f"cannot be written on rank {world.comm.rank}: {error.strerror}"
            raise UserError(text, field=FLAG, value=str(error.filename or "")) from None

    return together(world, attempt, kind)


def _all_see(work: Path, world: Group) -> bool:
    """Whether every rank can write in the first rank's directory: they look for a token in it.

    A rank that does not see the token yet (NFS caches names) makes the export slower, not wrong.
    """
    mark, word = work / ".token", secrets.token_hex(8)

    def leave() -> str:
        if world.index == 0:
            mark.write_text(word)
        return word

    left = _together(world, leave, str)[0]

    def look() -> bool:
        try:
            with mark.open("rb+") as file:
                return file.read() == left.encode()
        except OSError:  # not there, not ours, read-only
            return False

    seen = all(_together(world, look, bool))
    _together(world, lambda: mark.unlink() if world.index == 0 else None)
    return seen


def check_target(directory: str, spec: ModelSpec, world: Group) -> None:
    """Refuse before training what ``save_hf`` would refuse on the first rank. Called on all ranks."""
    together(world, lambda: _check_target(Path(directory), spec) if world.index == 0 else None)


def _check_target(path: Path, spec: ModelSpec) -> None:
    """Refuse a directory that is not empty or cannot be made, and a model without a Hugging Face family."""
    to_hf_config(spec)
    if path.exists() and not _is_empty(path):
        raise UserError("exists and is not an empty directory", field=FLAG, value=str(path), accepted="a new directory")
    check_work(path, FLAG)
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = f"cannot be made in {parent}: no directory, or not a writable one"
        raise UserError(problem, field=FLAG, value=str(path), accepted="a new directory where the first rank may write")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _create(
    final: Path, work: Path, spec: ModelSpec, plan: dict[str, StoredTensor], source: str | Companions | None
) -> None:
    """Write headers, full-size files, config, index and accompanying files."""
    _check_target(final, spec)
    along = from_directory(source) if isinstance(source, str) else source or Companions()
    config = export_config(spec, along.config, main_dtype(plan))
    make_work(final, FLAG)
    along.write(work)
    (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for file in dict.fromkeys(t.file for t in plan.values()):
        entries = {name: t for name, t in plan.items() if t.file == file}
        header, size = file_header(entries), sum(t.nbytes for t in entries.values())
        with (work / file).open("wb") as out:
            out.write(header)
            if size:
                os.posix_fallocate(out.fileno(), len(header), size)  # a full disk is noticed here, not half-way
    if len({t.file for t in plan.values()}) > 1:
        total = sum(t.nbytes for t in plan.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: t.file for name, t in plan.items()}}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        final.rmdir()


def _write(
    work: Path,
    table: dict[str, HFSource],
    owned: Iterable[Owned],
    plan: dict[str, StoredTensor],
    nonfinite: dict[str, None],
) -> None:
    """Write this rank's boxes to their offsets."""
    for name, box, values in owned:
        stored = _stored(values, table[name], plan, nonfinite)
        put_box(work, plan[table[name].name], table[name].slices(box), stored)


def _stored(
    values: torch.Tensor, source: HFSource, plan: dict[str, StoredTensor], nonfinite: dict[str, None]
) -> np.ndarray:
    """Values as stored in the files; names of tensors that are not finite are recorded."""
    stored = as_stored(values, source, plan[source.name].dtype)
    if not is_finite(stored):
        nonfinite[source.name] = None
    return bits(stored)


def _write_on_first(
    work: Path,
    table: dict[str, HFSource],
    owned: Iterable[Owned],
    plan: dict[str, StoredTensor],
    nonfinite: dict[str, None],
    world: Group,
) -> None:
    """The first rank writes everything and holds one tensor at a time besides its own.

    All ranks go through the tensors in file order. Before each, the first rank reports that the previous one is written
    (or all raise its error), and the others announce and send their boxes of the next.
    """
    mine: list[Owned] = []
    arrived: list[tuple[str, Box, np.ndarray]] = []
    together(world, lambda: mine.extend(owned))

    def turn(pieces: list[Owned]) -> list[tuple[str, Box]]:
        while arrived:
            name, box, stored = arrived.pop()
            put_box(work, plan[table[name].name], table[name].slices(box), stored)
        return [(name, box) for name, box, _ in pieces]

    for tensor in plan:
        pieces = [piece for piece in mine if table[piece[0]].name == tensor and piece[1].size]
        offers = _together(world, partial(turn, pieces), list[tuple[str, Box]])
        here = [(name, box, _stored(values, table[name], plan, nonfinite)) for name, box, values in pieces]
        if world.index == 0:
            arrived += here + _receive(offers, table, plan[tensor].dtype, world)
        else:
            _send([stored for _, _, stored in here], world)
        del here
    _together(world, partial(turn, []), list[tuple[str, Box]])


def _send(parts: list[np.ndarray], world: Group) -> None:
    """Send to the first rank as bytes, since not every device or backend supports every dtype."""
    comm = world.comm
    for stored in parts:
        flat = torch.from_numpy(stored.reshape(-1).view(np.uint8)).to(comm.device)
        comm.isend(flat, world.ranks[0], tag=0).wait()


def _receive(
    offers: list[list[tuple[str, Box]]], table: dict[str, HFSource], dtype: torch.dtype, world: Group
) -> list[tuple[str, Box, np.ndarray]]:
    """The announced boxes of the other ranks, one after the other in rank order."""
    comm, out = world.comm, []
    for rank, offered in zip(world.ranks[1:], offers[1:], strict=True):
        for name, box in offered:
            flat = torch.empty(box.size * dtype.itemsize, dtype=torch.uint8, device=comm.device)
            comm.irecv(flat, rank, tag=0).wait()
            shape = box.shape[::-1] if table[name].transpose else box.shape
            out.append((name, box, flat.cpu().numpy().view(DTYPES[dtype][1]).reshape(shape)))
    return out
