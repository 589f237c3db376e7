"""Layer-wise dump of one step on one platform, compared with that of another: the first layer that differs.

A dump is a directory of safetensors files, one per step, with each module's output and its gradient as fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hetero_megatron.errors import UserError
from hetero_megatron.model.gpt import ResidualStream
from hetero_megatron.ops.conformance.compare import distance
from hetero_megatron.utils.text import plural, word

_PARTS = ("layers", "embed_tokens", "norm", "lm_head")


class LayerDump:
    """Keeps the outputs of embedding, layers, their attention and MLP, and head, in the order in which they ran.

    Only the first micro-batch of a step counts: it is the same on every platform.
    """

    def __init__(self, model: torch.nn.Module, directory: str | Path, rank: int) -> None:
        self.directory, self.rank = Path(directory), rank
        self.directory.mkdir(parents=True, exist_ok=True)
        self.active = True
        self._order: list[str] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._hooks = []
        for name, module in model.named_modules():
            short_name = name.removeprefix("model.")
            depth = short_name.count(".")
            part = depth <= 2 if short_name.startswith("layers.") else depth == 0 and short_name != "layers"
            if short_name.split(".")[0] in _PARTS and part:
                self._hooks.append(module.register_forward_hook(self._hook(short_name)))

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: Any, out: Any) -> None:
            first_output = out.sum() if isinstance(out, ResidualStream) else out[0] if isinstance(out, tuple) else out
            if not self.active or not isinstance(first_output, torch.Tensor) or name in self._tensors:
                return
            self._order.append(name)
            self._tensors[name] = first_output.detach().float().cpu().contiguous().clone()
            out = out[0] if isinstance(out, tuple) else out  # of a stream: its gradient is the sum's
            if out.requires_grad:

                def keep_gradient(grad: torch.Tensor) -> None:
                    self._order.append(f"{name}.gradient")
                    self._tensors.setdefault(f"{name}.gradient", grad.detach().float().cpu().contiguous().clone())

                out.register_hook(keep_gradient)

        return keep

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def write(self, step: int) -> Path:
        """Write the step and forget it."""
        path = self.directory / f"step{step:06d}-rank{self.rank:05d}.safetensors"
        order = list(dict.fromkeys(self._order))
        try:
            save_file(self._tensors, path, metadata={"order": json.dumps(order)})
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            problem = f"cannot be written on rank {self.rank}: {error}"
            raise UserError(problem, field="--dump-layers", value=str(path), accepted="a folder with room") from None
        self._order, self._tensors = [], {}
        return path


@dataclass(frozen=True)
class Row:
    file: str
    tensor: str
    error: float


@dataclass(frozen=True)
class Comparison:
    """Relative error per tensor in the order of computing. ``first``: the first over the tolerance."""

    rows: tuple[Row, ...]
    tolerance: float

    @property
    def first(self) -> Row | None:
        return next((row for row in self.rows if not row.error <= self.tolerance), None)

    @property
    def ok(self) -> bool:
        return self.first is None

    def to_dict(self) -> dict[str, Any]:
        first = None if self.first is None else asdict(self.first)
        return {"ok": self.ok, "tolerance": self.tolerance, "first": first, "rows": [asdict(r) for r in self.rows]}

    def text(self) -> str:
        lines = [f"{'file':<34}{'tensor':<44}relative error"]
        rows_over = 0
        for row in self.rows:
            mark = "  <-- first over the tolerance" if row is self.first else ""
            rows_over += row.error > self.tolerance
            lines.append(f"{row.file:<34}{row.tensor:<44}{row.error:.2e}{mark}")
        compared = plural(len(self.rows), "tensor")
        end = f"all {compared} {word(len(self.rows), 'agrees', 'agree')} to {self.tolerance:g}"
        if self.first is not None:
            end = f"first diverging: {self.first.tensor} in {self.first.file} ({rows_over} of {compared})"
        return "\n".join([*lines, end])


def compare_dumps(one: str | Path, other: str | Path, tolerance: float) -> Comparison:
    """Compare two directories of dumps, file by file.

    Raises:
        UserError: a directory holds no dump, or the two are of unlike steps, ranks or models.
    """
    names = [sorted(p.name for p in Path(d).glob("step*.safetensors")) for d in (one, other)]
    for directory, file_names in zip((one, other), names, strict=True):
        if not file_names:
            raise UserError("holds no dump", field="directory", value=str(directory),
                            accepted="what pretrain_gpt.py --dump-layers DIR wrote")  # fmt: skip
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))
        raise UserError(f"the dumps are of unlike steps or ranks: {odd[0]} is in one only", field="directory",
                        value=str(other), accepted="dumps of the same plan and steps")  # fmt: skip
    rows = []
    for name in names[0]:
        a, b = load_file(Path(one) / name), load_file(Path(other) / name)
        if a.keys() != b.keys():
            raise UserError(f"{name}: unlike tensors, e.g. {sorted(a.keys() ^ b.keys())[0]}", field="directory",
                            value=str(other), accepted="dumps of the same model and plan")  # fmt: skip
        rows += [Row(name, key, distance(b[key], a[key])[0]) for key in _order(Path(one) / name)]
    return Comparison(tuple(rows), tolerance)


def _order(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(json.loads(file.metadata()["order"]))
