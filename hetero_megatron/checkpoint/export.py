"""Writing the files of an export from any plan: every rank writes the boxes it owns into files that are there already.

Nothing is gathered. Without a shared file system the first rank writes every file and receives one tensor at a time
from its owners.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from hetero_megatron.checkpoint.hf_files import DTYPES, StoredTensor, as_stored, bits, put_box
from hetero_megatron.checkpoint.typed import is_finite
from hetero_megatron.comm import Group
from hetero_megatron.comm.group import together
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec.hf_names import HFSource
from hetero_megatron.utils.outputs import ASIDE, inside, move_up, try_export
from hetero_megatron.utils.text import WorkLine, listed, tracked

_MARK = ".hetero-megatron-export"  # in every folder that was made here; gone when the export is complete


def work_of(final: Path) -> Path:
    """The folder in which the export to ``final`` is written. UserError: ``final`` has no file name."""
    if inside(final):
        return final / ASIDE
    if final.name in ("", ".."):
        raise UserError("is not a name", value=str(final), field="--save-hf", accepted="the name of a new directory")
    return final.with_name(final.name + ASIDE)


def check_target(final: Path, field: str) -> None:
    """Refuse what cannot be written, or holds something, and what :func:`check_work` refuses."""
    try_export(str(final), field)
    check_work(final, field)


def check_work(final: Path, field: str) -> None:
    """Refuse if something is in the way that is not left over from an export of ours.

    Raises:
        UserError: naming it.
    """
    work = work_of(final)
    if os.path.lexists(work) and not _is_left_over(work):
        raise UserError(
            f"is written in {work} first, which exists and was not made by an export that was cut off",
            field=field, value=str(final), accepted="another directory, or that one moved away",
        )  # fmt: skip


def make_work(final: Path, field: str) -> Path:
    """Make an empty folder to write in; removes leftovers of interrupted exports. OSError: it cannot be made.

    Raises:
        UserError: as :func:`check_work`.
    """
    check_work(final, field)
    work = work_of(final)
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    (work / _MARK).touch(exist_ok=False)
    return work


def publish_work(final: Path) -> None:
    """Give a complete export its name, or its files to the directory that is there."""
    work = work_of(final)
    if inside(final):
        (work / _MARK).unlink()
        move_up(work)
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    work.rename(final)
    (final / _MARK).unlink()


def _is_left_over(work: Path) -> bool:
    """Whether it is a real folder that is empty or has our mark."""
    try:
        entries = os.listdir(work)
        real = stat.S_ISDIR(os.lstat(work).st_mode)
        return real and (not entries or stat.S_ISREG(os.lstat(work / _MARK).st_mode))
    except OSError:  # no folder, or without the mark
        return False


Owned = tuple[str, Box, torch.Tensor]  # logical name, box, its values


@dataclass
class Export:
    """One directory that all ranks of ``world`` write together.

    Attributes:
        flag: that asked for it, for messages; final: the directory, which ``work`` becomes when it is complete.
        table: where each logical tensor is stored; plan: the stored tensors.
        nonfinite: names of stored tensors in which this rank has written NaN or Inf.
    """

    flag: str
    final: Path
    world: Group
    table: Mapping[str, HFSource]
    plan: Mapping[str, StoredTensor]
    nonfinite: dict[str, None] = field(default_factory=dict)

    @cached_property
    def work(self) -> Path:
        return work_of(self.final)

    def run(
        self, create: Callable[[], None], owned: Iterable[Owned], publish: Callable[[], str],
        allow_nonfinite: bool = False,
    ) -> str:  # fmt: skip
        """Called on all ranks.

        Args:
            create: writes, on the first rank, all files with their headers and full sizes.
            owned: what this rank owns; all ranks together own every element once.
            publish: gives the directory its name, on the first rank; its summary is returned on all ranks.

        Raises:
            UserError: on all ranks: it cannot be written, or values are not finite; nothing is left behind.
        """
        self.world.comm.activity = f"writing {self.flag}"
        created: list[bool] = []  # on the first rank: what is there is this export's

        def begin() -> None:
            if self.world.index == 0:
                check_work(self.final, self.flag)
                created.append(True)
                create()

        try:
            self.together(begin)
            if self._all_see():
                self.together(lambda: self._write(owned))
            else:
                self._write_on_first(owned)
            if not allow_nonfinite:
                self._require_finite()
            return str(self.together(lambda: publish() if self.world.index == 0 else "", str)[0])
        except UserError:
            if created:
                shutil.rmtree(self.work, ignore_errors=True)
            raise

    def together(self, action: Callable[[], Any], kind: Any = NoneType) -> list[Any]:
        """Like :func:`~hetero_megatron.comm.group.together`, for actions that write."""

        def attempt() -> Any:
            self.world.comm.fence()  # a rank that hung writes nothing once its job went on without it
            try:
                return action()
            except OSError as error:
                text = f"cannot be written on rank {self.world.comm.rank}: {error.strerror}"
                raise UserError(text, field=self.flag, value=str(error.filename or self.final)) from None

        return together(self.world, attempt, kind)

    def _require_finite(self) -> None:
        def check() -> None:
            if self.nonfinite:
                problem = f"is not written: NaN or Inf in {listed(self.nonfinite)} on rank {self.world.comm.rank}"
                accepted = "weights that are finite in the dtype of the files (--save-hf-dtype)"
                raise UserError(problem, field=self.flag, value=str(self.final), accepted=accepted)

        self.together(check)

    def _all_see(self) -> bool:
        """Whether every rank can write in the first rank's directory: they look for a token in it.

        A rank that does not see the token yet (NFS caches names) makes the export slower, not wrong.
        """
        mark, word = self.work / ".token", secrets.token_hex(8)

        def leave() -> str:
            if self.world.index == 0:
                mark.write_text(word)
            return word

        token = self.together(leave, str)[0]

        def look() -> bool:
            try:
                with mark.open("rb+") as file:
                    return file.read() == token.encode()
            except OSError:  # not there, not ours, read-only
                return False

        is_seen = all(self.together(look, bool))
        self.together(lambda: mark.unlink() if self.world.index == 0 else None)
        return is_seen

    def _write(self, owned: Iterable[Owned]) -> None:
        """Write this rank's boxes to their offsets."""
        total = sum(tensor.nbytes for tensor in self.plan.values())
        with WorkLine(f"writing {self.flag}", total / self.world.size) as line:  # about this rank's
            for name, box, values in owned:
                self._put(name, box, self._stored(values, self.table[name]))
                line.add(box.size * self.plan[self.table[name].name].dtype.itemsize)

    def _put(self, name: str, box: Box, stored: np.ndarray) -> None:
        self.world.comm.fence()
        put_box(self.work, self.plan[self.table[name].name], self.table[name], box, stored)

    def _stored(self, values: torch.Tensor, source: HFSource) -> np.ndarray:
        """Values as stored in the files; names of tensors that are not finite are recorded."""
        stored = as_stored(values, source, self.plan[source.name].dtype)
        if not is_finite(stored):
            self.nonfinite[source.name] = None
        return bits(stored)

    def _write_on_first(self, owned: Iterable[Owned]) -> None:
        """The first rank writes everything and holds one tensor at a time besides its own.

        All ranks go through the tensors in file order. Before each, the first rank reports that the previous one is
        written (or all raise its error), and the others announce and send their boxes of the next.
        """
        owned_here: list[Owned] = []
        arrived: list[tuple[str, Box, np.ndarray]] = []
        together(self.world, lambda: owned_here.extend(owned))

        def turn(pieces: list[Owned]) -> list[tuple[str, Box]]:
            while arrived:
                self._put(*arrived.pop())
            return [(name, box) for name, box, _ in pieces]

        sizes = {name: tensor.nbytes for name, tensor in self.plan.items()}
        for tensor in tracked(self.plan, f"writing {self.flag}", sum(sizes.values()), sizes.__getitem__):
            pieces = [piece for piece in owned_here if self.table[piece[0]].name == tensor and piece[1].size]
            offers = self.together(partial(turn, pieces), list[tuple[str, Box]])
            stored_here = [(name, box, self._stored(values, self.table[name])) for name, box, values in pieces]
            if self.world.index == 0:
                arrived += stored_here + self._receive(offers, self.plan[tensor].dtype)
            else:
                self._send([stored for _, _, stored in stored_here])
            del stored_here
        self.together(partial(turn, []), list[tuple[str, Box]])

    def _send(self, parts: list[np.ndarray]) -> None:
        """Send to the first rank as bytes, since not every device or backend supports every dtype."""
        comm = self.world.comm
        for stored in parts:
            flat = torch.from_numpy(stored.reshape(-1).view(np.uint8)).to(comm.device)
            comm.isend(flat, self.world.ranks[0], tag=0).wait()

    def _receive(
        self, offers: list[list[tuple[str, Box]]], dtype: torch.dtype
    ) -> list[tuple[str, Box, np.ndarray]]:
        """The announced boxes of the other ranks, one after the other in rank order."""
        comm, out = self.world.comm, []
        for rank, offered in zip(self.world.ranks[1:], offers[1:], strict=True):
            for name, box in offered:
                flat = torch.empty(box.size * dtype.itemsize, dtype=torch.uint8, device=comm.device)
                comm.irecv(flat, rank, tag=0).wait()
                shape = [box.shape[axis] for axis in self.table[name].order(len(box.shape))]
                out.append((name, box, flat.cpu().numpy().view(DTYPES[dtype][1]).reshape(shape)))
        return out
