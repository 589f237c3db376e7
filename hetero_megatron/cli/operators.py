"""docs/operators.md from the operators' specs: ``python -m hetero_megatron.cli.operators --markdown``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

from hetero_megatron.ops import SPECS
from hetero_megatron.ops.registry import reference_kernel, upgraded
from hetero_megatron.ops.spec import OpSpec

_INTRO = """\
# Operators

Written by `python -m hetero_megatron.cli.operators --markdown` from `hetero_megatron/ops/`; do not edit.

What a kernel of a [vendor plugin](vendor_plugin.md) implements: `forward(*arguments)` returns the results, then the
extras; `backward(*gradients of the results, *saved, *options)` returns the gradients. Options are numbers, flags and
structures; all other arguments are tensors, or lists of tensors where it says so.

- *Version*: of the contract, which a kernel names (`Kernel(version=...)`, 1 if it does not). A kernel of another
  version is refused, but for those after "also".
- *Saved*: what backward gets, if the kernel's state is portable.
- *Parts*: further functions that a kernel must bring (`Kernel(parts=...)`).
- *Features*: what a kernel may lack; it says what it has (`Capability(features=...)`), and without one it serves no
  stage that needs it.

| operator | version | tensors | options | results and extras | saved | gradients of | parts | features |
|---|---|---|---|---|---|---|---|---|
"""


def accepted_versions(spec: OpSpec) -> list[int]:
    """Earlier versions whose kernels can be registered, too."""
    kernels = (replace(reference_kernel(spec), version=version) for version in range(1, spec.version))
    return [kernel.version for kernel in kernels if upgraded(spec, kernel).version == spec.version]


def row(spec: OpSpec) -> str:
    """One operator's row of the table."""
    older = accepted_versions(spec)
    version = f"{spec.version}, also {', '.join(map(str, older))}" if older else str(spec.version)
    marks = dict.fromkeys(spec.optional, " (or None)") | dict.fromkeys(spec.lists, " (list)")
    tensors = ", ".join(f"`{name}`{marks.get(name, '')}" for name in spec.tensors)
    results = _names(spec.results + spec.extras) if not spec.in_place else f"in place: {_names(spec.in_place)}"
    cells = (tensors, _names(spec.options), results, _names(spec.saves), _names(spec.gradients))
    return f"| `{spec.name}` | {version} | " + " | ".join((*cells, _names(spec.parts), _names(spec.features))) + " |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def markdown() -> str:
    """docs/operators.md."""
    return _INTRO + "\n".join(row(spec) for _, spec in sorted(SPECS.items())) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--markdown"]:
        sys.stdout.write(markdown())
    else:
        raise SystemExit("usage: python -m hetero_megatron.cli.operators --markdown")
