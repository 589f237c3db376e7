"""The repository keeps its own rules: pins, links, layers without torch, the lint, the Makefile."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

NO_TORCH = (
    "errors", "utils", "environment", "layout", "cluster", "spec", "schedule", "plans", "predictor", "planner",
    "testbed",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "deepspeed", "triton")


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


lint, import_circles = tool("lint_vendor_neutral"), tool("lint_import_circles")


def rules(source: str, path: str = "hetero_megatron/training/loop.py") -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in lint.check_source(source, path)]


@pytest.mark.parametrize(
    "line",
    [
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import synchronize",
        "import torch; torch.cuda.synchronize()",
        "import torch as t; t.backends.cudnn.benchmark = True",
        "x.cuda()",
        "device = 'cuda'",
        "device = f'cuda:{rank}'",
        "backend = 'cpu:gloo,cuda:nccl'",
        "getattr(torch, 'npu')",
    ],
)
def test_vendor_names_are_found(line: str) -> None:
    assert rules(line) == [(1, "vendor")]
    assert rules(line, "hetero_megatron/platform/gpu.py") == []
    assert rules(line, "plugins/hetero_plugins/nvidia.py") == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch; torch.distributed.barrier()",
        "import torch.distributed.checkpoint as dcp",
    ],
)
def test_torch_distributed_is_found(line: str) -> None:
    assert rules(line) == [(1, "distributed")]
    assert rules(line, "hetero_megatron/comm/groups.py") == []


def test_checkpoints_may_use_distributed_checkpoint_and_no_more() -> None:
    path = "hetero_megatron/checkpoint/dcp.py"
    assert rules("import torch.distributed.checkpoint as dcp\ndcp.DefaultSavePlanner()", path) == []
    assert rules("import torch\ntorch.distributed.checkpoint.DefaultSavePlanner()", path) == []
    assert rules("import torch\ntorch.distributed.barrier()", path) == [(2, "distributed")]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "import torch.distributed as dist; dist.all_gather_object([], x)",
        "from torch.distributed import broadcast_object_list",
        "anything.scatter_object_list(out, values)",
        "import torch.distributed.checkpoint as dcp; dcp.save({})",
        "from torch.distributed.checkpoint import load",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=False)",
    ],
)
def test_pickle_is_found(line: str) -> None:
    assert rules(line, "hetero_megatron/comm/groups.py")[-1:] == [(1, "pickle")]
    assert "pickle" not in dict(map(reversed, rules(line, "tests/test_x.py")))  # type: ignore[arg-type]
    assert rules(f"{line}  # lint: allow pickle (an exception's name)", "hetero_megatron/comm/groups.py") == []


def test_reading_tensors_only_is_no_pickle() -> None:
    assert rules("import torch; torch.load(path, weights_only=True)") == []
    assert rules("group.gather_objects(value, str)") == []


@pytest.mark.parametrize(
    "source",
    [
        '"""A sentence about cuda."""',
        "a.device_type",
        "torch.accelerator.synchronize()",
        "name = 'cuda-like'",
    ],
)
def test_harmless_lines_pass(source: str) -> None:
    assert rules(source) == []


def test_an_excuse_needs_a_reason_and_the_right_rule() -> None:
    assert rules("x = 'nccl'  # lint: allow vendor (Megatron's spelling)") == []
    assert rules("x = 'nccl'  # lint: allow vendor ()") == [(1, "vendor")]
    assert rules("x = 'nccl'  # lint: allow size (no)") == [(1, "vendor")]


def test_long_files_and_functions_are_found() -> None:
    body = "def f():\n" + "    pass\n" * 79
    assert rules(body) == []
    assert rules(body + "    pass\n") == [(1, "size")]
    assert rules('def f():\n    """\n' + "    text\n" * 50 + '    """\n' + "    pass\n" * 79) == []
    assert rules("x = 1\n" * 501) == [(1, "size")]


def test_lower_layers_start_without_torch() -> None:
    """Every module of planner, plan, schedule, spec, layout, cluster is imported in one new interpreter."""
    names = []
    for package in NO_TORCH:
        base = ROOT / "hetero_megatron" / package
        files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        names += [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files if f.stem != "__main__"]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group(0)).lower()


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = [line for line in lines if line.strip() and not line.startswith("#")]
    assert [line for line in exact if not re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line)] == []
    return {_name(line): line.split("==")[1] for line in exact}


def test_every_requirement_of_make_env_is_pinned() -> None:
    pins = _pins()
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    wanted = {
        _name(text) for text in re.findall(r'^ +"([A-Za-z0-9._-]+(?:>=[0-9.]+)?)",', source, re.MULTILINE)
    }
    wanted |= {_name(text) for text in re.findall(r'\["?([^]"]+)"', source) if ">=" in text}
    assert {"torch", "numpy", "pytest", "deepspeed"} <= wanted
    assert wanted - set(pins) <= {"wandb", "mlflow-skinny", "sentencepiece"}  # offered, never installed by us
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS" in text


def test_make_alone_lists_every_target() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=30, env=environment)
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^  make (\S+)", done.stdout, re.MULTILINE))
    assert listed >= {
        "env",
        "demo",
        "test",
        "test-slow",
        "test-parity",
        "test-fuzz",
        "test-scale",
        "bench",
        "lint",
        "types",
        "clean",
    }


def test_make_env_without_a_recent_python_says_what_is_missing(tmp_path: Path) -> None:
    command = ["tools/make_venv.sh", str(tmp_path / "venv"), "dev", "/nowhere/python3.11"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "no Python 3.11 or newer found (tried: /nowhere/python3.11)" in done.stderr


def test_no_string_names_a_module_of_another_layer() -> None:
    """Where import-linter cannot see it; the command line and its worker may name what is below them."""
    package = ROOT / "hetero_megatron"
    found = []
    for path in package.rglob("*.py"):
        own = path.relative_to(package).parts[0]
        if own in ("cli", "plugin_check"):
            continue
        text = path.read_text(encoding="utf-8")
        if not re.search(r"^(?!\s*(?:from|import) ).*\bhetero_megatron\.", text, re.MULTILINE):
            continue  # parsing all files takes seconds
        nodes = list(ast.walk(ast.parse(text)))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                named = set(re.findall(r"\bhetero_megatron\.(\w+)", node.value)) - {own}
                found += [(path, node.lineno, name) for name in named if (package / name).is_dir()]
    assert not found


def circles_of(folder: Path, sources: dict[str, str]) -> list[list[str]]:
    """Circles among modules written into ``folder``, by dotted name; what has modules below it is a package."""
    files = {}
    for module, text in sources.items():
        path = folder.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in sources)
        path = path / "__init__.py" if is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        files[module] = path
    found: list[list[str]] = import_circles.circles(import_circles.graph(files))
    return found


@pytest.mark.parametrize(
    "back",
    [
        "import p.a",
        "from p import a",
        "from p.a import f",
        "from p.a import *",
        "from .a import f",
        "from . import a",
        "def f():\n    from p.a import g",
        "if TYPE_CHECKING:\n    from p.a import f",
        "x = 'p.a'",
        "x = 'p.a:f'",
        "x = 'p.a.f'",
        "x = ['python', '-m', 'p.a']",
    ],
)
def test_circles_of_imports_are_found(tmp_path: Path, back: str) -> None:
    sources = {"p": "", "p.a": "from p.b import x", "p.b": "import p.c", "p.c": back}
    assert circles_of(tmp_path, sources) == [["p.a", "p.b", "p.c", "p.a"]]
    assert circles_of(tmp_path, {**sources, "p.c": "import os"}) == []


def test_circles_through_the_init_of_another_package_are_found(tmp_path: Path) -> None:
    sources = {"p": "", "p.a": "from p.q.low import f", "p.q": "from p.q.high import g", "p.q.low": ""}
    assert circles_of(tmp_path, {**sources, "p.q.high": "import p.a"}) == [["p.a", "p.q", "p.q.high", "p.a"]]
    assert circles_of(tmp_path, {**sources, "p.q.high": "import p.q.low"}) == []


def test_every_group_of_modules_that_import_each_other_is_reported_once(tmp_path: Path) -> None:
    sources = {"a": "import b", "b": "import a, c", "c": "import d", "d": "import c", "e": "import a, e"}
    assert sorted(circles_of(tmp_path, sources)) == [["a", "b", "a"], ["c", "d", "c"]]


@pytest.mark.parametrize("text", ['"""p.a does the work."""', "x = 'p.az'", "x = 'q.a'", "x = 'see p.a'", "# p.a"])
def test_words_that_name_no_module_make_no_circle(tmp_path: Path, text: str) -> None:
    assert circles_of(tmp_path, {"p": "", "p.a": "import p.b", "p.b": text}) == []


def test_what_is_one_thing_is_one_file() -> None:
    """Few small files, none that is long, and names that tell files apart; plugin packages all have a ``plugin.py``."""
    folders = (ROOT / "hetero_megatron", ROOT / "kernels", ROOT / "plugins")
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]
    lines = {path: path.read_bytes().count(b"\n") for path in paths}
    assert sum(count < 60 for count in lines.values()) < 40
    assert [path for path, count in lines.items() if count > 400] == []
    names = Counter(path.name for path in paths)
    assert [name for name, count in names.items() if count > 3 and name != "plugin.py"] == []


MAX_TRACKED_BYTES = 1 << 20


def test_no_output_of_a_run_is_tracked() -> None:
    """Weights, logs and the like: nothing large, and nothing that a program leaves where it was started."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert [f.name for f in files if f.stat().st_size > MAX_TRACKED_BYTES] == []
    left = (".safetensors", ".out", ".log", ".pt", ".bin")
    assert [f.name for f in files if f.suffix in left and (ROOT / "tests") not in f.parents] == []


# Names that two packages' vocabularies share.
SHARED_CLASS_NAMES = {"Capability", "Hop", "Optimizer", "StageTimes"}


def test_public_class_names_are_unique() -> None:
    """One name means one thing across the package; the library's face, ``hm.Plan``, has names of its own."""
    places: dict[str, list[str]] = {}
    face = ROOT / "hetero_megatron/api"
    for path in (path for path in (ROOT / "hetero_megatron").rglob("*.py") if path.parent != face):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    repeated = {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED_CLASS_NAMES}
    assert repeated == {}


def test_a_runtime_holds_no_more_than_it_needs() -> None:
    """What other objects own is asked of them."""
    tree = ast.parse((ROOT / "hetero_megatron/training/runtime.py").read_text())
    runtime = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Runtime")
    stored = {
        node.attr for node in ast.walk(runtime)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }  # fmt: skip
    assert {"executor", "optimizer"} < stored and len(stored) <= 15
