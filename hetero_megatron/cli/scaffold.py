"""The files of a new plugin package. ``plugins/example_vendor`` is its output, which a test checks."""

from __future__ import annotations

import re
from pathlib import Path

from hetero_megatron.errors import UserError

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "hetero-NAME"
version = "0.1.0"
description = "Hetero-Megatron plugin for NAME devices"
requires-python = ">=3.11"
dependencies = ["hetero-megatron"]

[project.entry-points."hetero_megatron.plugins"]
NAME = "hetero_NAME.plugin"

[tool.setuptools]
packages = ["hetero_NAME"]

[tool.ruff]
line-length = 120
lint.select = ["E", "F", "W"]
"""

README = """# hetero-NAME

A plugin for Hetero-Megatron: the platform `NAME`, and a `swiglu` kernel for it.

    pip install -e .
    hetero-megatron plugins list
    hetero-megatron plugins check NAME
    pytest

As written, the platform is the CPU, so that all of this runs anywhere. To make it yours:

1. `hetero_NAME/platform.py`: derive from `Accelerator` instead of `CPU`; set `device_type` (what your adapter calls
   the device: `torch.<device_type>`), `adapter` (the module to import), `backends` (process groups), `dtypes` and
   `limits`.
2. `hetero_NAME/swiglu.py`: call your kernel. Forward and backward are registered together.
3. `plugins check NAME` says what is wrong; with `--profile rates.json` it writes rates for the planner.
4. Add operators one by one. What you do not have runs on Triton or aten, and the kernel plan says so at start.

A run uses the kernels of the platform it is on: `pretrain_gpt.py --platform NAME …`.
"""

INIT = '''"""Hetero-Megatron plugin for NAME devices."""
'''

PLUGIN = '''"""The entry point: what this package adds to Hetero-Megatron."""

from __future__ import annotations

from hetero_megatron.platform.plugins import PluginApi
from hetero_NAME.platform import CLASS
from hetero_NAME.swiglu import KERNEL

HETERO_PLUGIN_API = 1  # read before anything here is imported


def register(api: PluginApi) -> None:
    """Called once in every process; has no other effects."""
    api.platform(CLASS())
    api.kernel(KERNEL)
'''

PLATFORM = '''"""The device. Replace CPU by Accelerator and say what your adapter calls things."""

from __future__ import annotations

from hetero_megatron.platform import CPU, Limits


class CLASS(CPU):
    name = "NAME"
    vendor = "NAME"
    limits = Limits(max_warps=8, max_grid=65_535)
'''

SWIGLU = '''"""silu(gate) * up: a kernel with its backward."""

from __future__ import annotations

import torch

from hetero_megatron.ops import Capability, Kernel
from hetero_megatron.ops.spec import VENDOR


def forward(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
    """gate, up: [..., f] -> ([..., f],). Backward gets what the spec saves: gate and up."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g = gate.to(wide)
    return ((g * torch.sigmoid(g) * up.to(wide)).to(gate.dtype),)


def backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> gradients of gate and up, computed in at least fp32."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u, d = gate.to(wide), up.to(wide), dy.to(wide)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


KERNEL = Kernel(
    "swiglu",
    "NAME",
    VENDOR,
    forward,
    backward,
    capability=Capability(platforms=("NAME",), dtypes=(torch.float32, torch.bfloat16, torch.float16)),
)
'''

TEST = '''"""The conformance kit of Hetero-Megatron on this plugin."""

from __future__ import annotations

import json
import subprocess
import sys


def test_conformance() -> None:
    check = ["plugins", "check", "NAME", "--json", "--no-speed"]
    done = subprocess.run([sys.executable, "-m", "hetero_megatron.cli.main", *check], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["platform"] == "NAME"
    assert {f["kernel"] for f in report["findings"]} == {"platform NAME", "swiglu:NAME"}
'''


def plugin_files(name: str) -> dict[str, str]:
    """Text by path of the package ``name``."""
    files = {
        "pyproject.toml": PYPROJECT, "README.md": README, f"hetero_{name}/__init__.py": INIT,
        f"hetero_{name}/plugin.py": PLUGIN, f"hetero_{name}/platform.py": PLATFORM,
        f"hetero_{name}/swiglu.py": SWIGLU, f"tests/test_{name}.py": TEST,
    }  # fmt: skip
    title = "".join(part.capitalize() for part in name.split("_"))
    return {path: text.replace("CLASS", title).replace("NAME", name) for path, text in files.items()}


def write_plugin(name: str, directory: Path) -> Path:
    """Write the package into ``directory / name``.

    Raises:
        UserError: ``name`` is no lower-case identifier, or the folder is there already or cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError("no package name", field="plugins new", value=name, accepted="lower case, like acme or my_chip")
    folder = directory / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("it is there already", field="plugins new", value=str(folder), accepted="a new folder")
    try:
        for path, text in plugin_files(name).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise UserError(problem, field="--directory", value=str(directory), accepted="a folder to write in") from None
    return folder
