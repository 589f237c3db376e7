"""Building the extension, once per torch version and sources, and loading it.

``python -m hetero_emulated_vendor.build`` builds it. Nothing else does: no run starts with minutes of compiling.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

NAME = "emulated_vendor_extension"
SOURCES = Path(__file__).parent / "csrc"
CACHE = "HETERO_EMULATED_CACHE"  # environment variable: where to keep what was built
COMMAND = "python -m hetero_emulated_vendor.build"
FLAGS = ["-O1", "-std=c++20", "-g0"]


def compiler() -> str | None:
    """The C++ compiler that would be used; None if there is none, or no ninja to run it."""
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    return found if found and _ninja() else None


def _ninja() -> bool:
    return shutil.which("ninja") is not None or (Path(sys.executable).parent / "ninja").exists()


def library() -> Path:
    """Where the built extension is, or would be."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _cache() / digest.hexdigest()[:16] / f"{NAME}.so"


def _cache() -> Path:
    if chosen := os.environ.get(CACHE):
        return Path(chosen)
    own = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(own, os.W_OK):
        return own / "cache" / "hetero_emulated_vendor"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero_emulated_vendor"


def built() -> bool:
    return library().exists()


def build() -> Path:
    """Build the extension unless it is there: about a minute. Processes that come meanwhile wait for the first."""
    path = library()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print(f"emulated_vendor: building its extension in {path.parent}", file=sys.stderr, flush=True)
            _compile(path)
    return path


def _compile(path: Path) -> None:
    from torch.utils import cpp_extension

    bin_folder = str(Path(sys.executable).parent)
    if bin_folder not in os.environ.get("PATH", "").split(os.pathsep):  # ninja of this environment
        os.environ["PATH"] = os.pathsep.join([bin_folder, os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / "whole.cpp"  # one unit: nearly all of the time goes into torch's headers
        whole.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
        cpp_extension.load(
            NAME, [str(whole)], extra_cflags=FLAGS, build_directory=folder, is_python_module=False,
            is_standalone=False, keep_intermediates=True,
        )  # fmt: skip
        os.replace(Path(folder) / f"{NAME}.so", path)


def load() -> ModuleType:
    """The extension.

    Raises:
        RuntimeError: it has not been built for this torch.
    """
    if not built():
        raise RuntimeError(f"the extension is not built for torch {torch.__version__}: {COMMAND}")
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> int:
    if not built() and compiler() is None:
        print("emulated_vendor: there is no C++ compiler with ninja, so its extension is not built", file=sys.stderr)
        return 1
    print(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
