"""Saving and loading distributed checkpoints: staged copies, a writer thread, agreement between ranks.

DCP's planners decide what is written and read, ``storage`` does it, ``exchange`` coordinates the ranks. All ranks must
share one file system.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.directory import CheckpointDirectory
from hetero_megatron.checkpoint.exchange import RankFailed, RemoteError, load_boxes, save_boxes
from hetero_megatron.checkpoint.manifest import Damaged, read_sums, verify
from hetero_megatron.checkpoint.metadata import check_files, file_limits, read_metadata
from hetero_megatron.checkpoint.model_files import ModelFiles, from_checkpoint
from hetero_megatron.checkpoint.storage import BoxReader, BoxWriter, empty_like_box
from hetero_megatron.comm import CommError, Group
from hetero_megatron.errors import UserError
from hetero_megatron.spec.foreign_checkpoints import refuse_foreign
from hetero_megatron.utils.out_of_memory import out_of_memory
from hetero_megatron.utils.text import notice_line

Merge = Callable[[Sequence[Any]], Mapping[str, Any]]
SAVE, LOAD, PRETRAINED = "--save", "--load", "--pretrained-checkpoint"  # what names a directory; convert: SOURCE
_PREVIOUS = "--load-previous-on-corruption to take the newest good one before it"
_INSTEAD = {LOAD: f"{_PREVIOUS}, or --ckpt-step N", PRETRAINED: f"{_PREVIOUS}, or an undamaged copy"}


class CheckpointSaver:
    """Writes checkpoints in the background. Every method is called on all ranks at the same point of the run.

    Values change only in an optimizer step, so they are copied during the next forward and backward: call ``staged``
    before changing values.

    Args:
        group: all saving ranks, in a group that nobody else uses (``Comm.background_group``).
        keep: number of checkpoints to keep (0: all), besides multiples of ``retain_interval`` steps.
        asynchronous: False: ``save`` returns when the checkpoint is complete.
        synchronize: waits for the device, so that staged copies are complete.
        extra: small files to store along.
        check: raises UserError if the path no longer leads to the run's directory; None: not checked.
        dtype: in which the saved weights are used; they must be finite in it, too. None: their own.
    """

    def __init__(
        self,
        path: str,
        group: Group,
        keep: int = 0,
        retain_interval: int | None = None,
        asynchronous: bool = True,
        synchronize: Callable[[], None] = lambda: None,
        extra: Mapping[str, bytes] | None = None,
        check: Callable[[], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.directory, self.group, self.dtype = CheckpointDirectory(path, check=check), group, dtype
        self.keep, self.retain_interval = keep, retain_interval
        self.asynchronous, self.synchronize, self.extra = asynchronous, synchronize, dict(extra or {})
        self._staged: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the current save has failed, as far as this rank knows; ``wait`` raises its error."""
        return self._error is not None

    def save(
        self, step: int, tensors: Mapping[str, BoxedTensor], state: Mapping[str, Any], local: Any, merge: Merge
    ) -> None:
        """Copy and write in the background; first waits for an earlier save.

        Args:
            tensors: boxes that this rank owns, by name; must not change before ``staged`` returns.
            state: for ``metadata.json``, equal on all ranks.
            local: this rank's value; ``merge`` of all ranks' values is added to the state (JSON).

        Raises:
            UserError: the earlier save failed (on all ranks).
        """
        self.wait()
        self._copied.clear()
        work = threading.Thread(target=self._work, args=(step, tensors, state, local, merge), daemon=True)
        self._thread = work
        work.start()
        if not self.asynchronous:
            self.wait()

    def staged(self) -> None:
        """Wait until the values passed to ``save`` are copied and may change."""
        self._copied.wait()

    def wait(self) -> None:
        """Wait until nothing is being written; raises the save's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _stage(self, name: str, tensor: BoxedTensor) -> BoxedTensor:
        parts = []
        for offset, (box, values) in tensor.parts.items():
            copy = self._staged.get((name, offset))
            if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
                copy = self._staged[name, offset] = empty_like_box(values)
            parts.append((box, copy.copy_(values.detach(), non_blocking=True)))
        return BoxedTensor(tensor.shape, parts)

    def _work(
        self, step: int, tensors: Mapping[str, BoxedTensor], state: Mapping[str, Any], local: Any, merge: Merge
    ) -> None:
        try:
            staged = {name: self._stage(name, tensor) for name, tensor in tensors.items()}
            self.synchronize()
        except Exception as error:  # out of host memory, a device error: the peers notice that this rank leaves
            self._error = error
            return
        finally:
            self._copied.set()
        self._write(step, staged, state, local, merge)

    def _write(
        self, step: int, staged: Mapping[str, BoxedTensor], state: Mapping[str, Any], local: Any, merge: Merge
    ) -> None:
        try:
            merged_state = {**state, **merge(self.group.gather_objects(local))}
            rank = self.group.ranks[self.group.index]
            prune = lambda: self.directory.prune(self.keep, self.retain_interval, step)  # noqa: E731
            writer = BoxWriter(self.directory, step, rank, merged_state, self.extra, prune, self.dtype)
            save_boxes(staged, writer, self.group)
        except Exception as error:
            if self.group.index == 0:
                self.directory.abandon(step)
            self._error = _cause(error, SAVE, str(self.directory.path), self.group)


def _cause(error: BaseException, field: str, value: str, group: Group) -> BaseException:
    """The exception to report: the first rank's failure, out of memory, or a lost peer.

    Args:
        field, value: the flag and directory that is saved to or loaded from.
    """
    if isinstance(error, RankFailed):
        inner = error.cause
        if (refusal := out_of_memory(inner, error.rank)) is not None:
            return refusal
        if isinstance(inner, OSError):
            reason, saves = f"({inner.strerror}: {inner.filename or value})", field == SAVE
            problem = f"cannot be written {reason}; older ones are untouched" if saves else f"cannot be read {reason}"
            accepted = f"a directory {'with room, writable' if saves else 'readable'} by all ranks"
            return UserError(f"the checkpoint {problem}", field=field, value=value, accepted=accepted)
        if isinstance(inner, Damaged):
            return damaged_error(inner, field)
        if isinstance(inner, UserError):
            return inner
        return RuntimeError(f"checkpoint: rank {error.rank} failed: {inner}")
    if isinstance(error, RuntimeError) and not isinstance(error, CommError):
        doing = "saving" if field == SAVE else "loading"
        peers = tuple(r for r in group.ranks if r != group.comm.rank)
        return group.comm.failure(peers, 0.0, error, f"{doing} a checkpoint")
    return error


def damaged_error(damage: Damaged, field: str) -> UserError:
    """The UserError for a damaged checkpoint; ``field``: the flag that named the directory."""
    return UserError(
        f"the checkpoint is damaged: {damage.path.name} {damage.problem}", field=field, value=str(damage.path),
        accepted=_INSTEAD.get(field, "another checkpoint of that directory (--ckpt-step N), or an undamaged copy"),
    )  # fmt: skip


def check_writable(path: str, group: Group) -> None:
    """Refuse at the start what would fail at the first save: a directory that is not writable, or not shared by all
    ranks.

    They look for a file with a fresh name, so stale files or caches do not matter.
    """
    directory, problem, name = Path(path), "", f".shared-{secrets.token_hex(8)}"
    try:
        if group.index == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch(exist_ok=False)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    problem = group.gather_objects(problem, str)[0]
    if not problem:
        probe = directory / group.gather_objects(name, str)[0]
        seen_by_ranks = group.gather_objects(probe.exists(), bool)
        unseen = [rank for rank, is_seen in zip(group.ranks, seen_by_ranks, strict=True) if not is_seen]
        if group.index == 0:
            probe.unlink(missing_ok=True)
        if unseen:
            problem = f"rank {unseen[0]} does not see what rank {group.ranks[0]} writes there"
    if problem:
        raise UserError(problem, field=SAVE, value=path, accepted="a directory that all ranks can write")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint with verified checksums. ``state``: ours; ``metadata``: DCP's; ``field``: the flag that
    named its directory."""

    path: Path
    step: int
    metadata: Metadata
    state: Mapping[str, Any]
    field: str

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor in it; None if it has no such tensor."""
        entry = self.metadata.state_dict_metadata.get(name)
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def model_files(self) -> ModelFiles:
        """The accompanying files: known names among those covered by the checksums."""
        try:
            return from_checkpoint(self.path, read_sums(self.path))
        except Damaged as error:
            raise damaged_error(error, self.field) from None

    def read_into(self, tensors: Mapping[str, BoxedTensor], group: Group) -> None:
        """Overwrite the values of all boxes, converting dtypes. Called on all ranks of ``group``."""
        try:
            load_boxes(tensors, BoxReader(self.path, self.metadata), group)
        except Exception as error:
            raise _cause(error, self.field, str(self.path), group) from error


def open_checkpoint(
    path: str,
    group: Group | None,
    step: int | None = None,
    previous: bool = False,
    log: Callable[[str], None] = print,
    field: str = LOAD,
) -> Checkpoint | None:
    """The newest checkpoint (or that of ``step``) below ``path``, verified; None if there are none.

    Called on all ranks of ``group``, which share the verification and agree on the result; None: one process.

    Args:
        previous: use the newest intact checkpoint before a damaged one, with a notice, instead of refusing.
        field: the flag that named ``path``.

    Raises:
        UserError: damaged, or ``step`` does not exist.
    """
    directory = CheckpointDirectory(path, log)
    damage: Damaged | None = None
    steps = _candidates(directory, group, step, previous, field)
    if isinstance(steps, Damaged):
        if not previous:
            raise damaged_error(steps, field)
        damage, steps = steps, _agree(group, directory.held(), list[int])[::-1]
        log(notice_line(f"{field} {damage.path}: {damage.problem}"))
    for candidate in steps:
        opened = _open(directory.place(candidate), candidate, group, field)
        if isinstance(opened, Checkpoint):
            return opened
        damage = opened
        if not previous:
            raise damaged_error(damage, field)
        passed = f"the checkpoint of step {candidate} is passed over"
        log(notice_line(f"{field} {damage.path} {damage.problem}: {passed}"))
    if damage is not None:
        raise UserError("no checkpoint is good", field=field, value=path, accepted="another directory")
    return None


def _candidates(
    directory: CheckpointDirectory, group: Group | None, step: int | None, previous: bool, field: str
) -> list[int] | Damaged:
    """Steps to try, best first; decided by the first rank."""

    def decide() -> list[int] | Damaged | UserError:
        try:
            refuse_foreign(directory.path, field)
        except UserError as error:
            return error
        steps = directory.held()
        if step is not None:
            if step not in steps:
                steps_text = ", ".join(map(str, steps[-8:])) or "no checkpoints"
                return UserError(
                    f"{directory.path} has no such step", field="--ckpt-step", value=step, accepted=steps_text
                )
            return [step]
        try:
            latest = directory.latest()
        except Damaged as error:
            return error
        if latest is None:
            return []
        return [latest, *(s for s in steps[::-1] if s < latest)] if previous else [latest]

    steps_or_error: list[int] | RemoteError | None = None
    if group is None or group.index == 0:
        decided = decide()
        steps_or_error = decided if isinstance(decided, list) else RemoteError.of(decided)
    steps_or_error = _agree(group, steps_or_error, list[int] | RemoteError | None)
    if isinstance(steps_or_error, list):
        return steps_or_error
    assert steps_or_error is not None
    problem = steps_or_error.error()
    if isinstance(problem, Damaged):
        return problem
    raise problem


def _agree(group: Group | None, value: Any, kind: Any) -> Any:
    """The first rank's value, on all ranks."""
    return value if group is None else group.gather_objects(value, kind)[0]


def _open(path: Path, step: int, group: Group | None, field: str) -> Checkpoint | Damaged:
    """Verify, every rank some of the files; the result is equal on all ranks."""
    damage: RemoteError | None = None
    opened = None
    part, parts = (group.index, group.size) if group is not None else (0, 1)
    try:
        sums = read_sums(path)
        metadata, state = read_metadata(path, sums, step)
        verify(path, sums, file_limits(metadata), part, parts)
        check_files(path, metadata, part, parts)
        opened = Checkpoint(path, step, metadata, state, field)
    except Damaged as error:
        damage = RemoteError.of(error)
    for trouble in group.gather_objects(damage, RemoteError | None) if group is not None else [damage]:
        if trouble is not None and isinstance(problem := trouble.error(), Damaged):
            return problem
    assert opened is not None
    return opened
