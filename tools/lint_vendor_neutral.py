"""What ruff cannot check: no vendor's names in the core, torch.distributed only in comm, no pickle, short files.

    python tools/lint_vendor_neutral.py [FILE or FOLDER ...]        # without arguments: the whole repository

Prints one ``file:line: rule: what is wrong`` per finding and exits with 1 if there are any. A comment on
the line excuses it, and must give a reason: ``# lint: allow vendor (Megatron's spelling of the flag)``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80  # the docstring and the decorators are not counted

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("hetero_megatron", "kernels", "plugins", "tools", "examples", "benchmarks", "tests")
CHECKED = (*FOLDERS, "pretrain_gpt.py", "setup.py")

# A file is subject to a rule unless its path begins with one of these.
VENDOR_FREE_OF_RULE = ("hetero_megatron/platform/", "plugins/", "tests/", "tools/lint_vendor_neutral.py")
DISTRIBUTED_FREE_OF_RULE = (
    "hetero_megatron/comm/",
    "hetero_megatron/platform/",
    "hetero_megatron/pipeline/",
    "plugins/",
    "tests/",
    "benchmarks/",
)
PICKLE_FREE_OF_RULE = ("tests/", "benchmarks/", "tools/lint_vendor_neutral.py")
FUNCTION_FREE_OF_RULE = ("tests/",)
# Parts of torch.distributed that are not communication, and where they may be used.
DISTRIBUTED_PARTS = {
    "torch.distributed.checkpoint": ("hetero_megatron/checkpoint/",),
    "torch.distributed.elastic": ("hetero_megatron/launch/",),
    "torch.distributed.launcher": ("hetero_megatron/launch/",),
}

_DEVICES = "cuda|hip|rocm|npu|xpu|mlu|musa|maca|hpu|gcu|sdaa|supa|mps"
_BACKENDS = "nccl|rccl|hccl|cncl|mccl|xccl|eccl"
# Whole strings only: "cuda:0" and "cpu:gloo,cuda:nccl" match, a sentence about CUDA does not.
VENDOR_STRING = re.compile(rf"(cpu:\w+,)?({_DEVICES}|{_BACKENDS})(:(\d*|\w+))?", re.IGNORECASE)
VENDOR_ATTRIBUTE = re.compile(rf"torch\.((backends|version)\.)?({_DEVICES}|cudnn)(\..+)?")
VENDOR_METHOD = re.compile(rf"(is_)?({_DEVICES})")
# What runs code of whoever wrote the bytes: between ranks, and from files. Functions of torch that pickle inside too.
PICKLES = re.compile(r"(pickle|cPickle|_pickle|marshal|shelve|dill|cloudpickle|joblib)(\..+)?")
PICKLING = re.compile(
    r"((all_gather|gather|scatter|broadcast|send|recv)_object(_list)?"
    r"|torch\.distributed\.checkpoint(\.state_dict_(saver|loader))?\.(async_)?(save|load)(_state_dict)?"
    r"|torch\.distributed\.checkpoint\.(utils\._DistWrapper|FileSystemReader|FileSystemWriter)"
    r"|.*\.(_object_to_tensor|_tensor_to_object))"
)
EXCUSE = re.compile(r"#\s*lint: allow ([a-z, ]+?)\s*\(([^)]+)\)")


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str  # "vendor" | "distributed" | "pickle" | "size" | "syntax"
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def check_source(source: str, path: str) -> list[Finding]:
    """All findings in one file; ``path`` is relative to the repository and decides which rules hold."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return [Finding(path, error.lineno or 1, "syntax", str(error.msg))]
    lines = source.splitlines()
    findings = list(_length(len(lines), path))
    rules = [rule for rule, free in RULES.items() if not path.startswith(free)]
    if rules:
        nodes = [node for node in ast.walk(tree) if isinstance(node, JUDGED)]
        names = _module_names(nodes)
        for rule in rules:
            findings += rule(nodes, names, path)
    kept = {(f.line, f.rule): f for f in findings if not _excused(f, lines)}  # one per line and rule
    return sorted(kept.values(), key=lambda f: (f.line, f.rule))


def _excused(finding: Finding, lines: list[str]) -> bool:
    found = EXCUSE.search(lines[finding.line - 1]) if finding.line <= len(lines) else None
    return found is not None and finding.rule in re.split(r"[,\s]+", found.group(1))


def _length(length: int, path: str) -> Iterator[Finding]:
    if length > MAX_FILE_LINES:
        yield Finding(path, 1, "size", f"{length} lines, at most {MAX_FILE_LINES}: split the file")


def _functions(nodes: Sequence[ast.AST], names: dict[str, str], path: str) -> Iterator[Finding]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                message = f"{node.name}() has {lines} lines, at most {MAX_FUNCTION_LINES}"
                yield Finding(path, node.lineno, "size", message)


def _imports(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """(line, local name, full dotted name) of every import in the file; relative ones are left out."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                yield node.lineno, item.asname or item.name.split(".")[0], item.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for item in node.names:
                yield node.lineno, item.asname or item.name, f"{node.module}.{item.name}"


def _module_names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Local name -> full dotted name, for names bound by imports: ``dist`` -> ``torch.distributed``."""
    names = {}
    for _, local, full in _imports(nodes):
        names[local] = local if full.split(".")[0] == local else full  # `import a.b` binds `a`
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """Full dotted name of an attribute chain that starts at an imported name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _vendor(nodes: Sequence[ast.AST], names: dict[str, str], path: str) -> Iterator[Finding]:
    hint = "belongs in a platform (hetero_megatron/platform) or a plugin; the core uses torch.accelerator"
    for line, _, full in _imports(nodes):
        if VENDOR_ATTRIBUTE.fullmatch(full):
            yield Finding(path, line, "vendor", f"import of {full}: {hint}")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = _dotted(node, names)
            if chain is not None and VENDOR_ATTRIBUTE.fullmatch(chain):
                yield Finding(path, node.lineno, "vendor", f"{chain}: {hint}")
            elif chain is None and VENDOR_METHOD.fullmatch(node.attr):
                yield Finding(path, node.lineno, "vendor", f".{node.attr}: {hint}")
        elif isinstance(node, ast.Constant) and VENDOR_STRING.fullmatch(repr(node.value).strip("'")):
            yield Finding(path, node.lineno, "vendor", f"{node.value!r}: {hint}")


def _distributed(nodes: Sequence[ast.AST], names: dict[str, str], path: str) -> Iterator[Finding]:
    hint = "only hetero_megatron/comm talks to torch.distributed"
    allowed = tuple(part for part, where in DISTRIBUTED_PARTS.items() if path.startswith(where))

    def refused(full: str) -> bool:
        inside = full == "torch.distributed" or full.startswith("torch.distributed.")
        return inside and not any(full == part or full.startswith(f"{part}.") for part in allowed)

    for line, _, full in _imports(nodes):
        if refused(full):
            yield Finding(path, line, "distributed", f"import of {full}: {hint}")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            full_name = _dotted(node, names)
            # The inner parts of `torch.distributed.checkpoint.save` are attributes too: judge whole chains.
            if full_name is not None and refused(full_name) and not _prefix_of_allowed(full_name, allowed):
                yield Finding(path, node.lineno, "distributed", f"{full_name}: {hint}")


def _pickle(nodes: Sequence[ast.AST], names: dict[str, str], path: str) -> Iterator[Finding]:
    hint = "it runs what others wrote; ranks exchange typed JSON (Group.gather_objects) and tensors"

    def refused(full: str) -> bool:
        return any(PICKLING.fullmatch(name) for name in (full, full.split(".")[-1]))

    for line, _, full in _imports(nodes):
        if PICKLES.fullmatch(full) or refused(full):
            yield Finding(path, line, "pickle", f"import of {full}: {hint}")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            full = _dotted(node, names) or node.attr
            if refused(full):
                yield Finding(path, node.lineno, "pickle", f"{full}: {hint}")
        elif isinstance(node, ast.Call) and _dotted(node.func, names) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            if not safe:
                yield Finding(path, node.lineno, "pickle", f"torch.load without weights_only=True: {hint}")


def _prefix_of_allowed(full: str, allowed: tuple[str, ...]) -> bool:
    return any(part.startswith(f"{full}.") for part in allowed)


# Rule -> beginnings of the paths that are free of it; and the kinds of nodes that rules look at.
RULES = {
    _functions: FUNCTION_FREE_OF_RULE,
    _vendor: VENDOR_FREE_OF_RULE,
    _distributed: DISTRIBUTED_FREE_OF_RULE,
    _pickle: PICKLE_FREE_OF_RULE,
}
JUDGED = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Constant, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)


def python_files(paths: list[str]) -> list[Path]:
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def main(arguments: list[str]) -> int:
    paths = arguments or [str(ROOT / name) for name in CHECKED if (ROOT / name).exists()]
    files = python_files(paths)
    count = 0
    for file in files:
        resolved = file.resolve()
        path = resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else file.as_posix()
        for finding in check_source(file.read_text(encoding="utf-8"), path):
            print(finding)
            count += 1
    print(f"lint_vendor_neutral: {len(files)} files, {count} findings", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
