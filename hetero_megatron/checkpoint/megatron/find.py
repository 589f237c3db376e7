"""Which checkpoint of Megatron's a directory means."""

from __future__ import annotations

import re
from pathlib import Path

from hetero_megatron.checkpoint.megatron.legacy import read_legacy
from hetero_megatron.checkpoint.megatron.tensors import MegatronTensors, damaged
from hetero_megatron.checkpoint.megatron.torch_dist import read_torch_dist
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import is_regular, read_text

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
