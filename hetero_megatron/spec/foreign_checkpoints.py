"""Recognise checkpoints of other programs, so that they are not reported as damaged or as no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import is_regular, read_bytes, read_json_object

_TO_HF = "weights in Hugging Face form for --load-hf or convert"
_STEP = re.compile(r"iter_\d+|release|weights")
_ANY_STEP = re.compile(r"(global_?)?(step|checkpoint|iter|epoch)[-_]?\d+.*|\d+")
_RANK = re.compile(r"mp_rank_\d+(_\d+){0,2}|tp_rank_\d+.*")
_MEGATRON = "hetero-megatron convert makes a directory for --load of its weights (optimizer states do not come along)"


def refuse_foreign(path: str | Path, field: str) -> None:
    """Refuse a directory with another program's checkpoints, or one level above or below ours.

    Args:
        field: the flag that named it.

    Raises:
        UserError: what it is, and what can be done with it.
    """
    root = Path(path)
    if root.exists() and not root.is_dir():
        raise UserError("is not a directory", field=field, value=str(path), accepted="a directory that --save wrote")
    if not root.is_dir() or _is_ours(root / "latest"):
        return
    if _ours(root):
        raise UserError(
            "is one checkpoint, not a directory of them", field=field, value=str(path),
            accepted="the directory that it is in, with --ckpt-step for its step",
        )  # fmt: skip
    foreign = foreign_format(root)
    if foreign is not None:
        raise UserError(f"is {foreign[0]}", field=field, value=str(path), accepted=foreign[1])


def foreign_format(root: Path) -> tuple[str, str] | None:
    """(what it is, what can be done with it) of a directory with another program's checkpoints."""
    return next(((description, accepted) for description, accepted, is_format in _FORMATS if is_format(root)), None)


def _is_ours(latest: Path) -> bool:
    """DeepSpeed also has a file of this name."""
    try:
        return bool(re.fullmatch(rb"iter_\d+ [0-9a-f]{64}\n", read_bytes(latest, limit=4096)))
    except UserError:
        return False


def _ours(root: Path) -> bool:
    """A single checkpoint of ours; its parent directory was meant."""
    return is_regular(root / "SHA256SUMS") and is_regular(root / "metadata.json")


def is_megatron(root: Path) -> bool:
    """Whether a directory holds checkpoints of Megatron's, or is one; False for ours."""
    return root.is_dir() and not _is_ours(root / "latest") and _megatron(root)


def _megatron(root: Path) -> bool:
    """The directory of a run (its tracker file, or iterations without ours), one iteration, or NeMo's ``weights``."""
    if is_regular(root / "latest_checkpointed_iteration.txt"):
        return True
    steps = _folders(root, _STEP)
    return any(is_regular(s / ".metadata") for s in steps) or any(map(_megatron_step, [root, *steps]))


def _megatron_step(step: Path) -> bool:
    """``mp_rank_*/model_optim_rng.pt``, or distributed: ``common.pt`` beside shards, or a word in ``metadata.json``."""
    ranks = _folders(step, _RANK)
    if any(is_regular(r / name) for r in ranks for name in ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")):
        return True
    if is_regular(step / "common.pt") and (is_regular(step / "metadata.json") or is_regular(step / ".metadata")):
        return True
    try:
        return "sharded_backend" in read_json_object(step / "metadata.json", limit=1 << 20)
    except UserError:  # not there, larger than Megatron's, or no JSON
        return False


def _deepspeed(root: Path) -> bool:
    steps = [root, *_folders(root, re.compile(r"global_step\d+"))]
    names = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?(mp_rank|layer)_\d+.*_states\.pt")
    return any(names.fullmatch(file.name) for step in steps for file in _entries(step))


def _nanotron(root: Path) -> bool:
    steps = [root, *_folders(root, re.compile(r"\d+"))]
    return any(is_regular(s / "checkpoint_metadata.json") and (s / "model").is_dir() for s in steps)


def _distributed(root: Path) -> bool:
    """Plain torch DCP, as written by torchtitan, FSDP scripts and others: in the directory, or in folders of steps."""
    return any(is_regular(step / ".metadata") for step in [root, *_folders(root, _ANY_STEP)])


def _hugging_face(root: Path) -> bool:
    weights = re.compile(r"(model|pytorch_model).*\.(safetensors|bin|index\.json)")
    return is_regular(root / "config.json") and any(weights.fullmatch(file.name) for file in _entries(root))


def _hugging_face_steps(root: Path) -> bool:
    """The output directory of Hugging Face's Trainer, or of another program that saves in that format."""
    return any(map(_hugging_face, _folders(root, _ANY_STEP)))


def _pickled(root: Path) -> bool:
    """A trainer's own pickled files, there or in folders of steps; recognised by name only."""
    names = re.compile(r"(checkpoint|ckpt|model|consolidated).*\.(pt|pth|ckpt)")
    return any(names.fullmatch(file.name) for step in [root, *_folders(root, _ANY_STEP)] for file in _entries(step))


def _folders(root: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in _entries(root) if name.fullmatch(path.name) and path.is_dir()]


def _entries(root: Path) -> Iterator[Path]:
    try:
        yield from sorted(root.iterdir())
    except OSError:  # whoever opens it will say so
        return


# (what it is, what can be done, how it is told), the more specific first
_FORMATS: tuple[tuple[str, str, Callable[[Path], bool]], ...] = (
    ("a Megatron-LM (or Megatron Core) checkpoint", _MEGATRON, _megatron),
    ("a DeepSpeed checkpoint", f"{_TO_HF}: its zero_to_fp32.py, with a script of the model's, makes them", _deepspeed),
    ("a nanotron checkpoint", f"{_TO_HF}: nanotron's examples/*/convert_nanotron_to_hf.py writes them", _nanotron),
    (
        "a checkpoint of torch.distributed.checkpoint (torchtitan, FSDP and others write it)",
        f"{_TO_HF}: the program that wrote it exports them (torchtitan: its convert_to_hf.py)", _distributed,
    ),
    ("a Hugging Face directory", "--load-hf, or convert makes a directory for --load of it", _hugging_face),
    (
        "a directory of Hugging Face checkpoints", "--load-hf, or convert, with one of the folders in it",
        _hugging_face_steps,
    ),
    ("a directory of another program's pickled checkpoints", f"{_TO_HF}, by that program's own tools", _pickled),
)  # fmt: skip
