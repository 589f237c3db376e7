"""Export of weights to a Hugging Face directory from any plan: headers first, then every rank writes the boxes it owns.

No rank gathers the model. Without a shared file system the first rank writes every file and receives one tensor at a
time from its owners. Files are written to ``DIRECTORY.incomplete``, which is renamed when complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from hetero_megatron.checkpoint.export import Export, Owned, make_work, publish_work
from hetero_megatron.checkpoint.export import check_target as check_folder
from hetero_megatron.checkpoint.hf_files import (
    SHARD_BYTES,
    StoredTensor,
    main_dtype,
    make_files,
    plan_files,
)
from hetero_megatron.checkpoint.model_files import CONFIG, ModelFiles, from_directory, is_tokenizer
from hetero_megatron.checkpoint.names import name_table, repeated_tensors, stored_boxes
from hetero_megatron.comm import Group
from hetero_megatron.comm.group import together
from hetero_megatron.spec import LogicalTensor, ModelSpec, logical_tensors
from hetero_megatron.spec.hf_export import export_config, exported_model, to_hf_config
from hetero_megatron.utils.text import plural

FLAG = "--save-hf"


def save_hf(
    directory: str,
    spec: ModelSpec,
    owned: Iterable[Owned],
    dtypes: torch.dtype | Mapping[str, torch.dtype],
    world: Group,
    source: str | ModelFiles | None = None,
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
    spec = exported_model(spec)
    table, final = name_table(spec), Path(directory)
    copies = repeated_tensors(spec)
    table |= {copy: replace(table[original], name=copy) for copy, original in copies.items()}
    logical = {tensor.name: tensor for tensor in logical_tensors(spec)}
    by_name = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(logical, dtypes)
    plan = plan_files(spec, by_name, shard_bytes)
    export = Export(FLAG, final, world, table, plan)
    summary = export.run(
        lambda: _create(final, export.work, spec, plan, source), _stored_pieces(spec, owned, logical),
        lambda: _publish(final), nonfinite is not None,
    )  # fmt: skip
    if nonfinite is not None:
        nonfinite |= export.nonfinite
    return summary


def _stored_pieces(
    spec: ModelSpec, owned: Iterable[Owned], logical: Mapping[str, LogicalTensor]
) -> Iterator[Owned]:
    """The same values by the names and boxes of the tensors in files."""
    copies = repeated_tensors(spec)
    for name, box, values in owned:
        if name not in logical:  # of a layer that predicts further tokens, in a family that has none
            continue
        for copy in (copy for copy, original in copies.items() if original == name):
            yield copy, box, values
        parts = list(stored_boxes(spec, logical[name], box))
        split_values = (
            values if logical[name].per_expert else values.split([stored_box.shape[0] for _, stored_box in parts])
        )
        for (stored, stored_box), value in zip(parts, split_values, strict=True):
            yield stored.name, stored_box, value


def _publish(final: Path) -> str:
    publish_work(final)
    files = [path for path in final.rglob("*") if path.is_file()]
    total, config = sum(path.stat().st_size for path in files), json.loads((final / CONFIG).read_text())
    tokenizer = "its tokenizer" if any(is_tokenizer(p.relative_to(final).as_posix()) for p in files) else "no tokenizer"
    counted = f"{plural(len(files), 'file')}, {plural(total, 'byte')}"
    return f"saved a Hugging Face {config['model_type']} model with {tokenizer} to {final}: {counted}"


def check_target(directory: str, spec: ModelSpec, world: Group) -> None:
    """Refuse before training what ``save_hf`` would refuse on the first rank. Called on all ranks."""
    together(world, lambda: _check_target(Path(directory), spec) if world.index == 0 else None)


def _check_target(path: Path, spec: ModelSpec) -> None:
    """Refuse a directory that is not empty or cannot be made, and a model without a Hugging Face family."""
    to_hf_config(exported_model(spec))
    check_folder(path, FLAG)


def _create(
    final: Path, work: Path, spec: ModelSpec, plan: dict[str, StoredTensor], source: str | ModelFiles | None
) -> None:
    """Write headers, full-size files, config, index and accompanying files."""
    _check_target(final, spec)
    model_files = from_directory(source) if isinstance(source, str) else source or ModelFiles()
    config = export_config(spec, model_files.config, main_dtype(plan))
    make_work(final, FLAG)
    model_files.write(work)
    (work / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    make_files(work, plan)
    if len({t.file for t in plan.values()}) > 1:
        total = sum(t.nbytes for t in plan.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: t.file for name, t in plan.items()}}
        (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
