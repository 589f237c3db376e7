"""Which checkpoint of Megatron's a directory means, and its weights as those of one of our models, checked before
anything is read."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hetero_megatron.checkpoint.hf_files import DTYPES
from hetero_megatron.checkpoint.megatron.legacy import read_legacy
from hetero_megatron.checkpoint.megatron.names import MegatronSource, is_copied, join, joined_shape, source
from hetero_megatron.checkpoint.megatron.tensors import EMBEDDING, HEAD, MegatronTensors, damaged
from hetero_megatron.checkpoint.megatron.torch_dist import read_torch_dist
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.utils.files import is_regular, read_text
from hetero_megatron.utils.text import listed


class MegatronWeights:
    """One tensor at a time, as ``HFWeights`` reads a Hugging Face directory.

    Attributes:
        notices: what the user should know.

    Raises:
        UserError: tensors that are missing, unexpected, of another shape or not floating point (all are listed), copies
            that differ, or a model that Megatron's formats do not hold.
    """

    def __init__(self, tensors: MegatronTensors, spec: ModelSpec) -> None:
        self.spec, self._tensors = spec, tensors
        self.notices: list[str] = []
        logical = logical_tensors(spec)
        self._sources = {t.name: source(spec, t.name, t.shape) for t in logical}
        self._rows = {name: s.shape[0] for s in self._sources.values() for name in s.names}
        self._check(logical)
        self._check_copies()

    def _check(self, expected_tensors: tuple[LogicalTensor, ...]) -> None:
        problems, used_names = [], set()
        for tensor in expected_tensors:
            entry = self._sources[tensor.name]
            name = self._name(entry)
            if name is None:
                problems.append(f"missing {entry.names[0]}")
                continue
            used_names.add(name)
            shape, expected = self._shape(name), entry.shape
            alone = name.endswith(("_w", "_v"))
            if shape != (tensor.shape if alone else expected) and not self._is_padded(name, shape, expected):
                problems.append(f"{name} is {list(shape)}, not {list(expected)}")
            if (dtype := self._tensors.parts[name][0].dtype) not in DTYPES:
                problems.append(f"{name} has dtype {str(dtype).removeprefix('torch.')}")
        tied = {HEAD} if self.spec.tied else set()
        problems += [f"unexpected {name}" for name in sorted(self._tensors.parts.keys() - used_names - tied)]
        if problems:
            problems_once = list(dict.fromkeys(problems))
            rest_text = f"; and {len(problems_once) - 12} more" if len(problems_once) > 12 else ""
            raise self._refuse(f"does not fit the model {self.spec.name}: {'; '.join(problems_once[:12])}{rest_text}")

    def _is_padded(self, name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Megatron pads the vocabulary to a multiple of tensor-parallel ranks."""
        if name not in (EMBEDDING, HEAD) or got[0] <= expected[0] or got[1:] != expected[1:]:
            return False
        notice = f"{name} has {got[0]} rows, the model {expected[0]} ids: the rest is padding, and left out"
        self.notices.append(notice)
        return True

    def _check_copies(self) -> None:
        unequal = [
            name for name, parts in self._tensors.parts.items()
            if is_copied(name, parts[0].shape, self._rows.get(name, 0))
            and any(not torch.equal(parts[0].read(), part.read()) for part in parts[1:])
        ]  # fmt: skip
        if unequal:
            raise self._refuse(f"the tensor-parallel ranks have different values of {listed(unequal)}")
        twice = self.spec.tied and HEAD in self._tensors.parts
        if twice and not torch.equal(self._whole(EMBEDDING), self._whole(HEAD)):
            raise self._refuse(f"holds {HEAD} with other values than {EMBEDDING}, and the model's head is tied to it")

    def _name(self, wanted: MegatronSource) -> str | None:
        return next((name for name in wanted.names if name in self._tensors.parts), None)

    def _shape(self, name: str) -> tuple[int, ...]:
        return joined_shape(name, [part.shape for part in self._tensors.parts[name]], self._rows[name])

    def _whole(self, name: str) -> torch.Tensor:
        parts, rows = self._tensors.parts[name], self._rows.get(name, 0)
        copied = is_copied(name, parts[0].shape, rows)
        return join(name, [part.read() for part in (parts[:1] if copied else parts)], self.spec.gated, rows)

    def _refuse(self, problem: str) -> UserError:
        accepted = "a checkpoint of that model (--model names another one)"
        return UserError(problem, field="SOURCE", value=self._tensors.origin, accepted=accepted)

    def name(self, tensor: LogicalTensor) -> str:
        """Megatron's tensor that holds it."""
        name = self._name(self._sources[tensor.name])
        assert name is not None
        return name

    def dtypes(self) -> dict[str, torch.dtype]:
        """Of all tensors, by logical name."""
        return {t.name: self._tensors.parts[self.name(t)][0].dtype for t in logical_tensors(self.spec)}

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        """The values of one box in the file's dtype."""
        whole_tensor = self._sources[tensor.name].cut(self._whole(self.name(tensor)))
        return whole_tensor[box.slices()].contiguous()


TRACKER = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"iter_(\d+)")


def open_megatron(path: str, step: int | None = None) -> MegatronTensors:
    """The tensors of a checkpoint: that of ``step``, else the one that the tracker file names, else the newest.

    Args:
        path: the directory of a run, or of one iteration.

    Raises:
        UserError: no such iteration, an unreadable one, or a format that is not read.
    """
    root = _iteration(Path(path), step)
    if is_regular(root / ".metadata"):
        return read_torch_dist(root)
    if any(folder.is_dir() for folder in root.glob("mp_rank_*")):
        return read_legacy(root)
    raise damaged("holds neither torch_dist's .metadata nor mp_rank_* (formats torch_dist and torch are read)", root)


def _iteration(root: Path, step: int | None) -> Path:
    if is_regular(root / ".metadata") or any(root.glob("mp_rank_*")):
        if step is not None:
            raise UserError("SOURCE is one iteration", field="--ckpt-step", value=step, accepted="leave the flag out")
        return root
    steps = {int(match[1]): p for p in sorted(root.iterdir()) if p.is_dir() and (match := _STEP.fullmatch(p.name))}
    if step is not None:
        if step not in steps:
            steps_text = ", ".join(map(str, sorted(steps)[-8:])) or "no iterations"
            raise UserError(f"{root} has no such step", field="--ckpt-step", value=step, accepted=steps_text)
        return steps[step]
    if is_regular(root / TRACKER):
        tracked = read_text(root / TRACKER, "SOURCE", limit=64).strip()
        if tracked == "release" and (root / "release").is_dir():
            return root / "release"
        if tracked.isascii() and tracked.isdigit() and int(tracked) in steps:
            return steps[int(tracked)]
        raise damaged(f"{TRACKER} names iteration {tracked[:20]!r}, which is not there", root)
    for name in ("release", "weights"):  # the second one is NeMo's
        if (root / name).is_dir():
            return root / name
    if not steps:
        raise damaged("holds no iterations", root)
    return steps[max(steps)]
