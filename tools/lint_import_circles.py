"""No circle of imports: not between modules, not hidden in functions, not by a module's name in a string.

    python tools/lint_import_circles.py          # hetero_megatron, kernels, plugins

Prints one circle of every group of modules that import each other, as ``a -> b -> a``, and exits with 1 if there are
any. A module imports

* what an import statement anywhere in it names: under ``TYPE_CHECKING`` and in functions too;
* what a string in it names that is one of our modules: ``"package.module"``, ``"package.module:name"``;
* the packages that hold those, as Python runs their ``__init__`` first, but for the ones that hold the module itself.

What a string only begins to name (``f"package.{name}"``) is not followed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"hetero_megatron": ROOT, "hetero_kernels": ROOT / "kernels"}
SOURCES |= {path.name: path.parent for path in (ROOT / "plugins").glob("*/hetero_*") if path.is_dir()}
NAME = re.compile(r"[\w.]+(:[\w.]+)?")  # in a string: of a module, or of a thing in one


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of ours."""
    found = {}
    for package, parent in SOURCES.items():
        for path in sorted((parent / package).rglob("*.py")):
            parts = path.relative_to(parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def named(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names that a file of ``package`` imports or names in a string, of modules or of things in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{base}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value.partition(":")[0]


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    found = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        edges = set()
        for name in named(ast.parse(path.read_text(encoding="utf-8")), package):
            # A name may be of a module, or of something in one: the longest part of it that is a module's.
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                edges.add(name)
            while (name := name.rpartition(".")[0]) and not f"{module}.".startswith(f"{name}."):
                edges.add(name)
        found[module] = edges
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """One circle for every group of modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(shortest(edges, set(group), min(group)))

    sys.setrecursionlimit(10_000)
    for module in edges:
        if module not in index:
            visit(module)
    return found


def shortest(edges: Mapping[str, set[str]], group: set[str], start: str) -> list[str]:
    """The shortest way from ``start`` through ``group`` back to it."""
    ways, reached = [[start]], {start}
    for way in ways:
        for other in sorted(edges[way[-1]] & group):
            if other == start:
                return [*way, start]
            if other not in reached:
                reached.add(other)
                ways.append([*way, other])
    raise AssertionError("a component without a circle")


def main() -> int:
    files = modules()
    found = circles(graph(files))
    for circle in found:
        print("import circle: " + " -> ".join(circle))
    print(f"lint_import_circles: {len(files)} modules, {len(found)} circles")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
