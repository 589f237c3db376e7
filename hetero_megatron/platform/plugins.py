"""Plugins: where they are found, what they may register, and what happens when one is broken.

A plugin is a module with ``HETERO_PLUGIN_API = 1`` and ``register(api)``. It is found by the entry-point group
``hetero_megatron.plugins`` or by the environment list ``HETERO_PLUGINS=module,module``. Its API version is read from
the source text, so that nothing of a plugin for another version runs. What fails is isolated: its registrations are
dropped as a whole, and ``plugins list`` names it and says why.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.ops.registry import Registry, torch_registry
from hetero_megatron.ops.spec import Kernel
from hetero_megatron.platform.accelerator import Accelerator
from hetero_megatron.platform.direct import DirectBackend

API_VERSION = 1
GROUP = "hetero_megatron.plugins"
ENVIRONMENT = "HETERO_PLUGINS"
# Modules of hetero_plugins.
BUILT_IN = (
    "reference", "cpu", "onednn", "triton", "sdpa", "fp8", "nvidia", "amd", "ascend", "flash_attention", "liger",
    "vendors", "flagcx",
)  # fmt: skip


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin was found: its name, module, and how (built in, entry point, environment)."""

    name: str
    module: str
    origin: str
    version: str = ""


class PluginApi:
    """What ``register`` gets. Calls only collect; they count when ``register`` returns."""

    version = API_VERSION

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernels: list[Kernel] = []
        self.platforms: list[Accelerator] = []
        self.directs: list[DirectBackend] = []

    def kernel(self, kernel: Kernel) -> None:
        assert isinstance(kernel, Kernel), f"not a Kernel: {kernel!r}"
        self.kernels.append(kernel)

    def platform(self, accelerator: Accelerator) -> None:
        assert isinstance(accelerator, Accelerator), f"not an Accelerator: {accelerator!r}"
        assert accelerator.name and accelerator.device_type, f"{accelerator!r} has no name or device_type"
        self.platforms.append(accelerator)

    def direct(self, backend: DirectBackend) -> None:
        assert isinstance(backend, DirectBackend), f"not a DirectBackend: {backend!r}"
        self.directs.append(backend)


@dataclass
class Plugin:
    """A plugin that was looked at. ``error``: why it does not take part; ``trace``: the traceback, if any."""

    source: PluginSource
    kernels: list[Kernel] = field(default_factory=list)
    platforms: list[Accelerator] = field(default_factory=list)
    directs: list[DirectBackend] = field(default_factory=list)
    error: str = ""
    trace: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass
class Plugins:
    """All plugins of this process, the registry of their kernels, and their platforms by name."""

    plugins: list[Plugin]
    registry: Registry
    platforms: dict[str, Accelerator]

    def find(self, name: str) -> Plugin:
        """The plugin called ``name`` (or by its module's name).

        Raises:
            UserError: there is none.
        """
        for plugin in self.plugins:
            if name in (plugin.source.name, plugin.source.module):
                return plugin
        from hetero_megatron.ops.registry import unknown

        raise unknown("plugin", name, [p.source.name for p in self.plugins], "plugin")

    def broken(self) -> list[Plugin]:
        return [p for p in self.plugins if not p.ok]


def discover(environment: Mapping[str, str] = os.environ) -> list[PluginSource]:
    """Every plugin there is, built-in ones first; nothing is imported."""
    sources = [PluginSource(name, f"hetero_plugins.{name}", "built in") for name in BUILT_IN]
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        version = point.dist.version if point.dist is not None else ""
        sources.append(PluginSource(point.name, point.value.partition(":")[0].strip(), "entry point", version))
    for module in filter(None, (word.strip() for word in environment.get(ENVIRONMENT, "").split(","))):
        if all(module != source.module for source in sources):
            sources.append(PluginSource(module.split(".")[0].removeprefix("hetero_"), module, "environment"))
    return sources


def load_plugins(sources: Iterable[PluginSource] | None = None) -> Plugins:
    """Load all plugins into a new registry."""
    registry, platforms = torch_registry(), dict[str, Accelerator]()
    plugins = []
    for source in discover() if sources is None else sources:
        plugin = load(source)
        if plugin.ok:
            _commit(plugin, registry, platforms)
        plugins.append(plugin)
    for accelerator in platforms.values():
        backends = (backend for plugin in plugins if plugin.ok for backend in plugin.directs)
        accelerator.brought = tuple(backend for backend in backends if accelerator.name in backend.platforms)
    return Plugins(plugins, registry, platforms)


def load(source: PluginSource) -> Plugin:
    """Import one plugin and collect what it registers; whatever it raises becomes its ``error``."""
    try:
        problem = version_problem(source.module)
        if problem:
            return Plugin(source, error=problem)
        with contextlib.redirect_stdout(sys.stderr):  # what a command prints may be read by a program
            module = importlib.import_module(source.module)
            api = PluginApi(source.name)
            module.register(api)
            for accelerator in api.platforms:
                if type(accelerator).available is not Accelerator.available:  # which lets nothing out
                    accelerator.available()
        return Plugin(source, api.kernels, api.platforms, api.directs)
    except (Exception, SystemExit) as error:  # whatever a plugin does wrong must not stop the others
        text = str(error).strip().splitlines()
        return Plugin(source, error=f"{type(error).__name__}: {text[0] if text else ''}", trace=traceback.format_exc())


def _commit(plugin: Plugin, registry: Registry, platforms: dict[str, Accelerator]) -> None:
    """Add everything that a plugin registered, or nothing."""
    registered: set[tuple[str, str]] = set()
    for kernel in plugin.kernels:
        problem = registry.problem(kernel)
        if problem is None and (kernel.op, kernel.provider) in registered:
            problem = UserError("registered twice by one plugin", field=f"kernel {kernel}")
        if problem is not None:
            plugin.error = str(problem)
            return
        registered.add((kernel.op, kernel.provider))
    for accelerator in plugin.platforms:
        if accelerator.name in platforms:
            plugin.error = f"platform {accelerator.name} is registered already"
            return
    for kernel in plugin.kernels:
        registry.register(kernel)
    platforms.update({a.name: a for a in plugin.platforms})


def version_problem(module: str) -> str:
    """Why the plugin's API version does not fit, read from its source; empty if it does."""
    path = source_file(module)
    if path is None:
        return f"no module {module} on this machine"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"SyntaxError: {path.name}:{error.lineno}: {error.msg}"
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        if any(isinstance(t, ast.Name) and t.id == "HETERO_PLUGIN_API" for t in node.targets):
            value = getattr(node.value, "value", None)
            if value == API_VERSION:
                return ""
            return f"it is for plugin API {value!r}; this version speaks {API_VERSION}; nothing of it was run"
    return f"it does not say HETERO_PLUGIN_API = {API_VERSION}; nothing of it was run"


def source_file(module: str) -> Path | None:
    """The file of a module, found without importing its package."""
    top, *submodules = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not submodules:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*submodules)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None
