"""Content of a checkpoint: the owners' master weights and moments as boxes, and everything else as JSON.

Tensors are named ``model.<logical name>`` and ``optimizer.<moment>.<logical name>``. Every element is written by its
owner, and read by its owner under the new plan, which sends it to the other holders. Of a model with adapters only
these are held: the base stays where it came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.manifest import METADATA, Damaged
from hetero_megatron.checkpoint.native import Checkpoint, damaged_error
from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from hetero_megatron.spec import LogicalTensor, ModelSpec, trained_tensors

MODEL, OPTIMIZER = "model", "optimizer"
ISLAND, LOST = "island", "lost"  # of outer steps: checkpoint/outer_state.py
WEIGHT_DTYPES = "weight_dtypes"  # key of the state
_DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
_MOMENTS = {"adam": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}
_MOMENTS["muon"] = [*_MOMENTS["adam"], *_MOMENTS["sgd"]]  # of matrices, and of all others


def owned_tensors(
    optimizer: ShardedOptimizer, spec: ModelSpec, with_optimizer: bool = True
) -> tuple[dict[str, BoxedTensor], dict[str, float]]:
    """(boxes by name, scalars such as Adam's step) of everything this rank owns."""
    shapes = {t.name: t.shape for t in trained_tensors(spec)}
    parts: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
    shared: dict[str, list[Any]] = defaultdict(list)
    inner = optimizer.inner
    for name, box, master in optimizer.owned():
        parts[f"{MODEL}.{name}"].append((box, master))
        for key, value in inner.state.get(master, {}).items() if with_optimizer and inner is not None else ():
            if isinstance(value, torch.Tensor) and value.shape == master.shape and value.dim():
                parts[f"{OPTIMIZER}.{key}.{name}"].append((box, value))
            elif value is not None:
                shared[key].append(value)
    numbers = {key: _common(key, values) for key, values in shared.items()}
    return {key: BoxedTensor(shapes[logical_name(key)], boxes) for key, boxes in parts.items()}, numbers


def _common(key: str, values: Sequence[Any]) -> float:
    """The common value of all; tensors on a device are read with one synchronisation."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    numbers = {float(v) for v in values if not isinstance(v, torch.Tensor)}
    if tensors:
        numbers |= set(torch.stack([t.detach().reshape(()) for t in tensors]).unique().tolist())
    assert len(numbers) == 1, f"{key} differs between elements: {sorted(numbers)}"
    return numbers.pop()


def logical_name(key: str) -> str:
    """Of the tensor that a key of the state is about: after ``model.``, ``lost.``, ``optimizer.<moment>.`` or
    ``outer.<kind>.``, each perhaps after ``island.<number>.``."""
    kind, _, rest = key.partition(".")
    if kind == ISLAND:
        return logical_name(rest.partition(".")[2])
    return rest if kind in (MODEL, LOST) else rest.partition(".")[2]


def merge_numbers(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of the first rank that owns anything."""
    nonempty: list[Mapping[str, float]] = [numbers for numbers in ranks if numbers]
    assert all(numbers == nonempty[0] for numbers in nonempty), f"optimizer steps differ between ranks: {nonempty}"
    return dict(nonempty[0]) if nonempty else {}


def moments(checkpoint: Checkpoint) -> list[str]:
    """Names of the optimizer's per-element states in a checkpoint (``exp_avg``, …); empty if there are none."""
    names = (key.split(".")[1] for key in checkpoint.metadata.state_dict_metadata if key.startswith(OPTIMIZER + "."))
    return sorted(set(names))


def load_tensors(
    checkpoint: Checkpoint, optimizer: ShardedOptimizer, spec: ModelSpec, group: Group, with_optimizer: bool
) -> None:
    """Load master weights and, if asked, moments; then update every holder's parameters. Called on all ranks."""
    check_model(checkpoint, spec)
    if with_optimizer:
        check_moments(checkpoint, spec)
        make_states(optimizer, moments(checkpoint), (checkpoint.state["optimizer"] or {}).get("numbers", {}))
    tensors, _ = owned_tensors(optimizer, spec, with_optimizer)
    checkpoint.read_into(tensors, group)
    optimizer.all_gather()


def check_moments(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Check that the optimizer's states are complete for every tensor.

    Raises:
        UserError: something is missing, or does not belong to the named optimizer.
    """
    saved = checkpoint.state["optimizer"] or {}
    names, numbers = moments(checkpoint), saved.get("numbers", {})
    if not names and not numbers:  # no step was taken yet
        return
    state_names = _MOMENTS.get(saved.get("name", ""), names)
    stepped = [t for t in trained_tensors(spec) if not t.by_load]
    wanted_shapes = {f"{OPTIMIZER}.{m}.{t.name}": t.shape for t in stepped for m in states_of(t, state_names)}
    stored_keys = {key for key in checkpoint.metadata.state_dict_metadata if key.startswith(OPTIMIZER + ".")}
    problems = sorted(
        key for key in stored_keys | wanted_shapes.keys() if checkpoint.shape(key) != wanted_shapes.get(key)
    )
    if "exp_avg" in state_names and "step" not in numbers:
        problems.append("the number of steps")
    if problems:
        problem = f"holds no complete state of its optimizer: {problems[0][:200]}"
        raise damaged_error(Damaged(checkpoint.path / METADATA, problem), checkpoint.field)


def states_of(tensor: LogicalTensor, kinds: Sequence[str]) -> Sequence[str]:
    """Those of an optimizer's kinds of states that a tensor has: all, but of Muon's only some."""
    if len(kinds) == 1 or "momentum_buffer" not in kinds:
        return kinds
    from hetero_megatron.plans.matrices import muon_states

    return muon_states(tensor, kinds)


def make_states(optimizer: ShardedOptimizer, names: Sequence[str], numbers: Mapping[str, float]) -> None:
    """Create optimizer states as at the first step, to be overwritten."""
    inner = optimizer.inner
    if inner is None or not names:
        return
    native = isinstance(inner, torch.optim.AdamW | torch.optim.SGD)  # others count steps in an int
    on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    is_mixed = len(names) > 1 and "momentum_buffer" in names  # Muon's, and Adam's of what are no matrices
    for matrix, master in ((is_mixed and "matrices" in g, m) for g in inner.param_groups for m in g["params"]):
        state_names = [name for name in names if not is_mixed or (name == "momentum_buffer") == matrix]
        state: dict[str, Any] = {name: torch.zeros_like(master) for name in state_names}
        for key, number in numbers.items() if not matrix else ():
            device = master.device if on_device else torch.device("cpu")
            state[key] = torch.tensor(number, dtype=torch.float32, device=device) if native else int(number)
        inner.state[master] = state


def check_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Check that the checkpoint has exactly the model's tensors, with their shapes; it may have more modules that
    predict further tokens.

    Raises:
        UserError: listing what does not match.
    """
    problems = []
    wanted_shapes = {f"{MODEL}.{t.name}": t.shape for t in trained_tensors(spec)}
    for name, shape in wanted_shapes.items():
        shape_there = checkpoint.shape(name)
        if shape_there != shape:
            problems.append(
                f"missing {name} {list(shape)}"
                if shape_there is None
                else f"{name} is {list(shape_there)}, not {list(shape)}"
            )
    stored = checkpoint.metadata.state_dict_metadata
    left_out_prefixes = tuple(f"{MODEL}.model.layers.{i}." for i in left_out(checkpoint, spec))
    model_names = (name for name in stored if name.startswith(MODEL + ".") and not name.startswith(left_out_prefixes))
    problems += [f"unexpected {name}" for name in model_names if name not in wanted_shapes]
    if problems:
        rest_text = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"is a checkpoint of another model than {spec.name}: {'; '.join(problems[:8])}{rest_text}",
            field=checkpoint.field, value=str(checkpoint.path), accepted=f"a checkpoint of {spec.name}",
        )  # fmt: skip


def left_out(checkpoint: Checkpoint, spec: ModelSpec) -> range:
    """Numbers of the layers of modules that predict further tokens that a checkpoint has and the model has not."""
    saved_layers = checkpoint.state["model"].get("mtp_layers", 0)
    return range(spec.predictions.stop, spec.num_layers + (saved_layers if type(saved_layers) is int else 0))


def weight_dtypes(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, torch.dtype]:
    """By logical name, the dtype of the original weights, used for exports.

    A checkpoint holds fp32 (or wider) masters, so a run that began with imported weights records their dtypes. A run
    from random weights has the dtype of the run, a converted checkpoint that of its own tensors.

    Raises:
        UserError: malformed dtypes in the checkpoint.
    """
    names = [t.name for t in trained_tensors(spec)]
    if checkpoint.state.get(WEIGHT_DTYPES) is not None:
        dtype_names = checkpoint.state[WEIGHT_DTYPES]
    elif checkpoint.state.get("plan") is None:  # converted
        entries = {name: checkpoint.metadata.state_dict_metadata[f"{MODEL}.{name}"] for name in names}
        dtype_names = {n: _name(e.properties.dtype) for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    else:
        dtype_names = dict.fromkeys(names, checkpoint.state["dtype"])
    if not isinstance(dtype_names, Mapping) or not all(isinstance(d, str) for d in dtype_names.values()):
        dtype_names = {}
    dtypes = {name: _DTYPES[dtype_names[name]] for name in names if dtype_names.get(name) in _DTYPES}
    if len(dtypes) < len(names):
        raise UserError(
            "does not say in which dtypes its weights are exported", field=checkpoint.field,
            value=str(checkpoint.path), accepted=f"{', '.join(_DTYPES)} for every tensor",
        )  # fmt: skip
    return dtypes


def encode_dtypes(dtypes: Mapping[str, torch.dtype] | None) -> dict[str, str] | None:
    """The form in the state, as :func:`weight_dtypes` reads it."""
    return None if dtypes is None else {name: _name(dtype) for name, dtype in dtypes.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
