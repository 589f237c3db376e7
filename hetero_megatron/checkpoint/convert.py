"""Hugging Face directory <-> native checkpoint <- Megatron's checkpoint; either of the first two -> a GGUF file. One
tensor at a time, in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hetero_megatron import __version__
from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.directory import CheckpointDirectory, write_synced
from hetero_megatron.checkpoint.hf_files import SHARD_BYTES
from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.hf_save import FLAG, save_hf
from hetero_megatron.checkpoint.manifest import (
    METADATA,
    SUMS,
    ChunkLocation,
    Damaged,
    encode_metadata,
    format_sums,
    sha256,
    unusable,
)
from hetero_megatron.checkpoint.model_files import ModelFiles, from_directory
from hetero_megatron.checkpoint.native import Checkpoint, damaged_error, open_checkpoint
from hetero_megatron.checkpoint.safefile import Files, write_file
from hetero_megatron.checkpoint.state import MODEL, check_model, weight_dtypes
from hetero_megatron.checkpoint.typed import is_finite, stored_spec
from hetero_megatron.comm import Comm, Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.spec import LogicalTensor, ModelSpec, load_model, logical_tensors
from hetero_megatron.utils.text import WorkLine, listed, tracked

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(checkpoint: Checkpoint) -> ModelSpec:
    """The model that a checkpoint's state describes."""
    path = checkpoint.path / METADATA
    try:
        spec: ModelSpec = stored_spec(checkpoint.state.get("model"))
        if checkpoint.state.get("dtype") not in DTYPES:
            raise UserError("unknown value", field="state.dtype", value=checkpoint.state.get("dtype"))
    except UserError as error:
        raise damaged_error(unusable(path, error), checkpoint.field) from None
    return spec


def _opened(source: str, step: int | None) -> tuple[Checkpoint, ModelSpec]:
    """A checkpoint of SOURCE and its model, which it holds whole. UserError: there is none, or it is damaged."""
    checkpoint = open_checkpoint(source, None, step, field="SOURCE")
    if checkpoint is None:
        raise UserError("holds no checkpoint", field="SOURCE", value=source, accepted="a directory that --save wrote")
    spec = spec_of(checkpoint)
    check_model(checkpoint, spec)
    return checkpoint, spec


def from_native(
    source: str, target: str, dtype: str | None = None, step: int | None = None, check_finite: bool = False
) -> dict[str, Any]:
    """Write the weights of a checkpoint as a Hugging Face directory; returns a summary for --json.

    Args:
        dtype: of the files; None: per tensor, the dtype of the original weights (``weight_dtypes``).
        check_finite: reject NaN and Inf, which are otherwise listed as ``nonfinite``.
    """
    checkpoint, spec = _opened(source, step)
    names = [tensor.name for tensor in logical_tensors(spec)]
    dtypes = dict.fromkeys(names, DTYPES[dtype]) if dtype else weight_dtypes(checkpoint, spec)
    model_files, chunks, nonfinite = checkpoint.model_files(), _chunks(checkpoint, spec), dict[str, None]()
    try:
        save_hf(target, spec, chunks, dtypes, _alone(), model_files, nonfinite=None if check_finite else nonfinite)
    except Damaged as error:
        raise damaged_error(error, checkpoint.field) from error
    except UserError as error:
        if error.field != FLAG:
            raise
        accepted = error.accepted.replace("--save-hf-dtype", "--dtype")
        raise UserError(error.problem, field="TARGET", value=target, accepted=accepted) from error
    summary = {"direction": "native to hf", "step": checkpoint.step, "model": spec.name, "dtype": _names(dtypes)}
    return summary | {"nonfinite": list(nonfinite), "notices": model_files.notices, "target": target}


def _names(dtypes: Mapping[str, torch.dtype]) -> str:
    """``bf16``, or ``bf16 and fp32``: the dtype of most tensors first."""
    counts = Counter(dtypes.values())
    return " and ".join(_NAMES[dtype] for dtype, _ in counts.most_common())


def _chunks(checkpoint: Checkpoint, spec: ModelSpec) -> Iterator[tuple[str, Box, torch.Tensor]]:
    files, tensors = Files(checkpoint.path), logical_tensors(spec)
    count = sum(tensor.size for tensor in tensors)
    for tensor in tracked(tensors, "exporting weights", count, lambda tensor: tensor.size, bytes=False):
        name = f"{MODEL}.{tensor.name}"
        entry = checkpoint.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            lo = tuple(chunk.offsets)
            box = Box(lo, tuple(a + n for a, n in zip(lo, chunk.sizes, strict=True)))
            place = checkpoint.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            yield tensor.name, box, files.read(place.file, place.key, Box.whole(box.shape).slices())


def to_gguf(
    source: str, target: str, native: bool, dtype: str | None = None, step: int | None = None,
    check_finite: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write a Hugging Face directory, or a checkpoint (``native``), as a GGUF file; returns a summary for --json.

    Args:
        dtype: of matrices; None: that of most of the source's weights.
        check_finite: reject NaN and Inf, which are otherwise listed as ``nonfinite``.
    """
    from hetero_megatron.checkpoint import gguf_file

    if native:
        checkpoint, spec = _opened(source, step)
        spec = replace(spec, mtp_layers=0)  # llama.cpp reads no modules that predict further tokens
        model_files, alone, number = checkpoint.model_files(), _alone(), checkpoint.step
        dtypes, notices = weight_dtypes(checkpoint, spec), model_files.notices

        def read(tensor: LogicalTensor) -> torch.Tensor:
            values = torch.empty(tensor.shape, dtype=dtypes[tensor.name])
            box = Box.whole(tensor.shape)
            checkpoint.read_into({f"{MODEL}.{tensor.name}": BoxedTensor(tensor.shape, [(box, values)])}, alone)
            return values

    else:
        weights, model_files = HFWeights(source, load_model(source, "SOURCE"), "SOURCE"), from_directory(source)
        spec, dtypes, notices, number = weights.spec, weights.dtypes(), (*weights.notices, *model_files.notices), 0

        def read(tensor: LogicalTensor) -> torch.Tensor:
            return weights.read(tensor, Box.whole(tensor.shape))

    file_dtype = DTYPES[dtype] if dtype else Counter(dtypes.values()).most_common(1)[0][0]
    if file_dtype not in gguf_file.DTYPES:
        accepted = ", ".join(_NAMES[known_dtype] for known_dtype in gguf_file.DTYPES)
        raise UserError("GGUF has no such dtype", field="--dtype", value=_NAMES[file_dtype], accepted=accepted)
    nonfinite = dict[str, None]()
    file_notices = gguf_file.write_gguf(
        target, spec, read, file_dtype, model_files.files, None if check_finite else nonfinite
    )
    summary = {"direction": f"{'native' if native else 'hf'} to gguf", "step": number}
    summary |= {"model": spec.name, "dtype": _NAMES[file_dtype], "nonfinite": list(nonfinite)}
    return summary | {"notices": (*notices, *file_notices), "target": target}


def _alone() -> Group:
    """This process by itself."""
    return Group(Comm(0, torch.device("cpu"), timedelta(0)), (0,), None)


class ImportedWeights(Protocol):
    """What is imported: ``HFWeights`` or ``MegatronWeights``, checked against ``spec``."""

    spec: ModelSpec
    notices: list[str]

    def dtypes(self) -> dict[str, torch.dtype]: ...

    def name(self, tensor: LogicalTensor) -> str: ...

    def read(self, tensor: LogicalTensor, box: Box) -> torch.Tensor: ...


def to_native(source: str, target: str, dtype: str | None = None, check_finite: bool = False) -> dict[str, Any]:
    """:func:`import_weights` of a Hugging Face directory."""
    weights = HFWeights(source, load_model(source, "SOURCE"), "SOURCE")
    return import_weights(weights, from_directory(source), "hf to native", target, dtype, check_finite)


def import_weights(
    weights: ImportedWeights, along: ModelFiles, direction: str, target: str, dtype: str | None, check_finite: bool
) -> dict[str, Any]:
    """Write weights as the checkpoint of step 0, loadable under any plan; returns a summary for --json.

    Args:
        along: accompanying files.
        target: a new directory; removed if the weights are rejected or cannot be written.
        dtype: of the stored weights; None: as in the files, bit for bit.
        check_finite: reject NaN and Inf, which are otherwise listed as ``nonfinite``.
    """
    spec, directory = weights.spec, CheckpointDirectory(target)
    if directory.held():
        raise UserError("holds checkpoints", field="TARGET", value=target, accepted="a new directory")
    tensors = logical_tensors(spec)
    dtypes = dict.fromkeys((t.name for t in tensors), DTYPES[dtype]) if dtype else weights.dtypes()
    state = _state(spec, _NAMES[Counter(dtypes.values()).most_common(1)[0][0]])
    nonfinite = dict[str, None]()
    new_folders = [path for path in (directory.path, *directory.path.parents) if not path.exists()]
    try:
        _write(directory, weights, dtypes, state, along.native(), nonfinite)
        if nonfinite and check_finite:
            problem = f"is not written: NaN or Inf in {listed(nonfinite)}"
            raise UserError(problem, field="TARGET", value=target, accepted="a source whose weights are finite")
        directory.publish(0)
    except BaseException as error:
        directory.abandon(0)
        with suppress(OSError):
            for path in new_folders:
                path.rmdir()
        if not isinstance(error, OSError):
            raise
        raise UserError(f"cannot be written: {error.strerror}", field="TARGET", value=target) from error
    summary = {"direction": direction, "step": 0, "model": spec.name, "dtype": _names(dtypes)}
    return summary | {"nonfinite": list(nonfinite), "notices": (*weights.notices, *along.notices), "target": target}


def _state(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The state of a training run before its first step."""
    absent_keys = (
        "plan",
        "plan_fingerprint",
        "seed",
        "loss_scale",
        "learning_rate",
        "weight_decay",
        "optimizer",
        "data",
        "kernels",
    )
    versions = {"hetero_megatron": __version__, "torch": torch.__version__}
    state = {"step": 0, "consumed_train_samples": 0, "model": asdict(spec), "dtype": dtype, "versions": versions}
    return state | dict.fromkeys(absent_keys)


def _write(
    directory: CheckpointDirectory,
    weights: ImportedWeights,
    dtypes: dict[str, torch.dtype],
    state: dict[str, Any],
    extra: dict[str, bytes],
    nonfinite: dict[str, None],
) -> None:
    """Write all files of the checkpoint without publishing it; names of tensors that are not finite are added to
    ``nonfinite``."""
    work, sums, places = directory.begin(0), {}, {}
    tensors = {f"{MODEL}.{t.name}": t for t in logical_tensors(weights.spec)}
    line = WorkLine("importing weights", sum(tensor.size for tensor in tensors.values()), bytes=False)

    def get(key: str) -> torch.Tensor:
        tensor = tensors[key]
        line.add(tensor.size)
        values = weights.read(tensor, Box.whole(tensor.shape)).to(dtypes[tensor.name])
        if not is_finite(values):
            nonfinite[weights.name(tensor)] = None
        return values

    with line:
        for number, names in enumerate(_deal(tensors, dtypes)):
            file = f"rank_{number:05d}.safetensors"
            entries = {name: (dtypes[tensors[name].name], tensors[name].shape) for name in names}
            sums[file], _ = write_file(work / file, entries, get)
            index_of_name = {n: MetadataIndex(n, torch.Size([0] * len(tensors[n].shape))) for n in names}
            places.update({index_of_name[n]: ChunkLocation(file, n) for n in names})
    metadata = Metadata({n: _whole(t, dtypes[t.name]) for n, t in tensors.items()}, storage_data=places)
    for name, content in {METADATA: encode_metadata(metadata, state).encode(), **extra}.items():
        write_synced(work / name, content)
        sums[name] = sha256(work / name)
    write_synced(work / SUMS, format_sums(sums).encode())


def _whole(tensor: LogicalTensor, dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def _deal(tensors: dict[str, LogicalTensor], dtypes: dict[str, torch.dtype]) -> list[list[str]]:
    """Tensor names by file, each of at most SHARD_BYTES (a larger tensor gets its own file); wide dtypes first."""
    files: list[list[str]] = [[]]
    file_bytes = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: -dtypes[entry[1].name].itemsize):
        size = tensor.size * dtypes[tensor.name].itemsize
        if files[-1] and file_bytes + size > SHARD_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(name)
        file_bytes += size
    return files
