"""Packaging: which versions we accept. The exact versions that are tested are pinned in constraints.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# Folder in the repository -> name of the package in it. `kernels/` and `plugins/` are no packages themselves.
SOURCES = {".": "hetero_megatron", "kernels": "hetero_kernels", "plugins": "hetero_plugins"}

REQUIRED = [
    "torch>=2.11",  # not an exact pin: vendors' images lag behind
    "numpy>=2.0",
    "pyyaml>=6.0",
    "safetensors>=0.5",
    "transformers>=5.0",
    "rich>=13.0",
    "jinja2>=3.1",  # chat templates
    "regex>=2025.1",  # which of a model's modules have adapters, in limited time
]
# Imported only where they are used: a machine without them still trains.
EXTRAS = {
    "data": ["datasets>=4.0", "pyarrow>=18.0"],
    "sentencepiece": ["sentencepiece>=0.2", "protobuf>=5.0", "tiktoken>=0.8", "blobfile>=3.0"],
    "tensorboard": ["tensorboard>=2.18"],
    "wandb": ["wandb>=0.18"],
    "mlflow": ["mlflow-skinny>=3"],
    "planner": ["scipy>=1.14", "pymetis>=2025.1"],
    "deepspeed": ["deepspeed>=0.18"],
    "gguf": ["gguf>=0.17"],
    "triton": ["triton>=3.5"],
    "mpi": ["mpich>=4.0", "mpi4py>=4.0"],  # for plugins/mpi_island
    "dev": [
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.12",
        "mypy>=1.15",
        "types-PyYAML",
        "import-linter>=2.5",
        "mpich>=4.0",
        "mpi4py>=4.0",
        "peft>=0.17",
        "gguf>=0.17",
    ],
}


def version() -> str:
    text = (ROOT / "hetero_megatron" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise SystemExit('hetero_megatron/__init__.py: no line of the form __version__ = "1.2.3"')
    return found.group(1)


def packages() -> tuple[list[str], dict[str, str]]:
    """All packages below the folders of SOURCES that exist, and where those outside the root are found."""
    names, folders = [], {}
    for folder, prefix in SOURCES.items():
        if (ROOT / folder / prefix).is_dir():
            names += find_packages(str(ROOT / folder), include=[prefix, f"{prefix}.*"])
            if folder != ".":
                folders[prefix] = f"{folder}/{prefix}"
    return names, folders


PACKAGES, PACKAGE_DIR = packages()

setup(
    name="hetero-megatron",
    version=version(),
    description="One language model, trained across whatever accelerators you have",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir=PACKAGE_DIR,
    package_data={"": ["*.yaml", "cards/*.yaml", "*.json", "*.html", "py.typed", "*.pyi"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hetero-megatron = hetero_megatron.cli.start:console"]},
)
