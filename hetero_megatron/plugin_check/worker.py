"""The worker process in which ``plugins check`` runs a plugin's code; started and supervised by :mod:`check_process`.

A line of JSON on standard input is a request, a line on the channel (a separate file descriptor) an event; plugins'
output goes to stderr. On the CPU every request is served by a forked child, so that a kernel cannot damage the process
for the next one. Devices do not survive a fork, so there the process serves requests itself and is replaced when it
ends.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Signature
from hetero_megatron.ops.conformance import FAIL, PASS, Finding, kernel_steps
from hetero_megatron.ops.conformance.speed import attention_rows, device_rates, gemm_rows, measure
from hetero_megatron.ops.conformance.subject import CheckHooks, attempt, describe
from hetero_megatron.ops.registry import torch_registry, unknown
from hetero_megatron.ops.spec import TRITON, Kernel
from hetero_megatron.ops.stage import stage_operators
from hetero_megatron.platform import CPU, Accelerator
from hetero_megatron.platform.conformance import check_platform
from hetero_megatron.platform.platform import platform_here
from hetero_megatron.platform.plugins import Plugin, Plugins, PluginSource, discover, load_plugins
from hetero_megatron.plugin_check import BROKEN_DEVICE, LOST_CHANNEL, Event
from hetero_megatron.spec import load_model, shares
from hetero_megatron.testbed.process import die_with_parent


class Channel:
    """The event channel, on a descriptor high enough that a kernel is unlikely to close it by accident."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def send(self, **event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        try:
            while line:
                line = line[os.write(self._handle, line) :]
        except OSError:
            os._exit(LOST_CHANNEL)


class CheckJob:
    """One plugin on one platform, with the options of the command line."""

    def __init__(self, asked: Event, channel: Channel) -> None:
        self.asked, self.channel = asked, channel
        sources = [s for s in discover() if s.module not in asked["without"]]

        def announced() -> Iterator[PluginSource]:
            for source in sources:
                channel.send(event="loading", name=source.name, module=source.module)
                yield source

        self.plugins = load_plugins(announced())
        channel.send(event="loading", name="", module="")
        self.plugin = _plugin(self.plugins, asked["name"])
        for op in asked["operators"] or ():
            self.plugins.registry.spec(op)
        self.accelerator = _accelerator(self.plugins, self.plugin, asked["platform"])
        self.sound, self.problems = _registrations(self.plugin)
        self.kernels = [k for k in self.sound if asked["operators"] is None or k.op in asked["operators"]]
        self.dtypes = [getattr(torch, name) for name in asked["dtypes"]]

    def describe(self) -> Event:
        """What the supervising process needs to know."""
        plugin, accelerator = self.plugin, self.accelerator
        problems = list(self.problems)
        if self.asked["platform"] is None and plugin.platforms and accelerator not in plugin.platforms:
            why = "; ".join(f"{a.name}: {a.absence()}" for a in plugin.platforms)
            lacks = f"none of its devices is here ({why})"
            problems.insert(0, Finding(f"plugin {plugin.source.name}", "device", "", "", FAIL, lacks))
        return {
            "plugin": plugin.source.name, "platforms": [a.name for a in plugin.platforms],
            "platform": accelerator.name, "chip": accelerator.chip(0),
            "forks": accelerator.device_type == "cpu" and not torch.accelerator.is_available(),
            "kernels": [{"name": str(k), "interpreted": k.interpreted} for k in self.kernels],
            "findings": [p.to_dict() for p in problems], "notes": _notes(self),
            "error": "" if self.problems else plugin.error,
        }  # fmt: skip

    def serve(self, request: Event) -> None:
        """One request: its events, all but the last."""
        if "platform" in request:
            self._platform(self.plugin.platforms[request["platform"]])
        elif "kernel" in request:
            self._kernel(self.kernels[request["kernel"]], request)
        elif "speed" in request:
            self._speed(self.kernels[request["speed"]], request)
        else:
            self._begin("speed", request["rates"], "rates of the device")
            dtype, accelerator = getattr(torch, request["rates"]), self.accelerator
            self.channel.send(event="value", rates=device_rates(accelerator.device(0), dtype, accelerator.synchronize))
        gc.collect()  # memory that is damaged shows when it is freed

    def _platform(self, accelerator: Accelerator) -> None:
        name = f"platform {accelerator.name}"
        self.channel.send(event="step", dtype="", case=name)
        for finding in check_platform(accelerator, lambda check: self._begin(check, "", "")):
            self.channel.send(event="finding", **finding.to_dict())

    def _kernel(self, kernel: Kernel, request: Event) -> None:
        dtypes = [d for d in self.dtypes if d in self.accelerator.dtypes]
        device = self.accelerator.device(0)
        steps = kernel_steps(
            self.plugins.registry.spec(kernel.op), kernel, device, lambda d: _signature(kernel.op, self.accelerator, d),
            dtypes, self.asked["quick"], CheckHooks(self._begin, self.accelerator.synchronize),
        )  # fmt: skip
        last_step, only_step = request.get("after"), request.get("only")
        for step in steps:
            place = [step.dtype, step.case]
            if last_step is not None or (only_step is not None and place != only_step):
                last_step = None if place == last_step else last_step
                continue
            self.channel.send(event="step", dtype=step.dtype, case=step.case)
            for finding in step.run():
                self.channel.send(event="finding", **finding.to_dict())
                if finding.status == FAIL:
                    self._require_device()
            if only_step is not None:
                return

    def _begin(self, check: str, dtype: str, case: str) -> None:
        self.channel.send(event="begin", check=check, dtype=dtype, case=case)

    def _require_device(self) -> None:
        """After an illegal access most devices fail every later call of the process, which must then be replaced."""
        _, problem = attempt(self.accelerator.synchronize)
        if problem:
            self.channel.send(event="broken", detail=problem)
            os._exit(BROKEN_DEVICE)

    def _speed(self, kernel: Kernel, request: Event) -> None:
        dtype, accelerator = getattr(torch, request["dtype"]), self.accelerator
        self._begin("speed", request["dtype"], "")
        if kernel.reasons(_signature(kernel.op, accelerator, dtype)):
            return
        self.channel.send(event="serves")
        spec, device, sync = self.plugins.registry.spec(kernel.op), accelerator.device(0), accelerator.synchronize
        for measured in measure(spec, kernel, device, dtype, tuple(request["rates"]), sync):
            self.channel.send(event="speed", **asdict(measured), share=measured.share)
        if kernel.op.startswith("gemm"):  # in fp8 too
            self.channel.send(event="rows", op=kernel.op, rows=gemm_rows(kernel, device, dtype, sync))
        if kernel.op == "attention":
            self.channel.send(event="rows", op="attention", rows=attention_rows(spec, kernel, device, dtype, sync))


def _plugin(plugins: Plugins, name: str) -> Plugin:
    """The plugin, or the kernels of torch's own providers as one."""
    if name in ("aten", "reference"):
        kernels = [k for k in torch_registry() if k.provider == name]
        return Plugin(PluginSource(name, "hetero_megatron.ops", "built in"), kernels)
    return plugins.find(name)


def _accelerator(plugins: Plugins, plugin: Plugin, platform: str | None) -> Accelerator:
    if platform is not None:
        if platform not in plugins.platforms:
            raise unknown("platform", platform, plugins.platforms, "--platform")
        if not plugins.platforms[platform].available():
            raise UserError(plugins.platforms[platform].absence(), field="--platform", value=platform)
        return plugins.platforms[platform]
    available = [a for a in plugin.platforms if a.available()]
    if available or plugin.platforms:
        return available[0] if available else CPU()
    name_here = platform_here(plugins.platforms.values())
    return plugins.platforms[name_here] if name_here is not None else CPU()


def _registrations(plugin: Plugin) -> tuple[list[Kernel], list[Finding]]:
    """(kernels that can be run, errors of the others)."""
    registry, sound, problems = torch_registry(), list[Kernel](), list[Finding]()
    if plugin.source.module == "hetero_megatron.ops":
        return plugin.kernels, []
    for kernel in plugin.kernels:
        problem = registry.problem(kernel)
        if problem is None:
            registry.register(kernel)
            sound.append(kernel)
            problems.append(Finding(str(kernel), "registration", "", "", PASS))
        else:
            problems.append(Finding(str(kernel), "registration", "", "", FAIL, problem.problem))
    return sound, problems if any(p.status == FAIL for p in problems) else []


def _signature(op: str, accelerator: Accelerator, dtype: torch.dtype) -> Signature:
    """What the small preset model would ask for."""
    spec = load_model("tiny")
    dims = dict(stage_operators(spec, shares(spec, (1,))[0], True, 1)).get(op, {})
    return Signature(op, accelerator.device_type, dtype, accelerator.name, accelerator.arch(0), dims)


_INTERPRETED = (
    "Triton kernels run under Triton's interpreter (TRITON_INTERPRET is set), about a thousand times slower; its bf16 "
    "is not a device's: it truncates casts to bf16, turns a bf16 zero into 2^-126 when it is widened, and adds bit "
    "patterns, so that a bf16 failure here may be the interpreter's (docs/kernels.md)"
)
_NOT_INTERPRETED = (
    "no accelerator is here and TRITON_INTERPRET is not set, so Triton kernels cannot run here: TRITON_INTERPRET=1 has "
    "them interpreted on the CPU"
)


def _notes(job: CheckJob) -> list[str]:
    """Limitations of this run, for its first line."""
    if job.accelerator.device_type != "cpu" or not _uses_triton(job.plugin):
        return []
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
    return [_INTERPRETED if interpreted else _NOT_INTERPRETED]


def _uses_triton(plugin: Plugin) -> bool:
    """Whether a kernel says so, or a source file of the plugin's package imports Triton."""
    if any(k.kind == TRITON or k.interpreted for k in plugin.kernels):
        return True
    spec = None if plugin.source.origin == "built in" else importlib.util.find_spec(plugin.source.module)
    if spec is None or not spec.origin:
        return False
    file = Path(spec.origin)
    files: Iterable[Path] = file.parent.rglob("*.py") if "." in plugin.source.module else [file]
    imports = re.compile(r"^\s*(import|from)\b.*\btriton\b", re.MULTILINE)
    return any(imports.search(f.read_text(encoding="utf-8", errors="replace")) for f in files if f.is_file())


def _is_single_threaded() -> bool:
    """Whether a fork is safe: locks held by other threads would stay locked in a child."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _import_all() -> None:
    """Import what torch loads lazily for our kernels' checks: two seconds that every child would spend."""
    kernel, device = torch_registry().kernel("rope", "reference"), torch.device("cpu")
    signature = lambda dtype: Signature("rope", "cpu", dtype, "cpu")  # noqa: E731
    first, *_, last = kernel_steps(SPECS["rope"], kernel, device, signature, (torch.float32,), quick=True)
    for step in (first, last):
        assert all(finding.status != FAIL for finding in step.run()), "the reference fails its own checks"


def _forked(channel: Channel, serve: Callable[[], None]) -> None:
    """``serve`` in a child process; its exit is the last event."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        os.setpgid(0, 0)  # what it starts ends with it
        channel.send(event="started", pid=os.getpid())
        try:
            serve()
        finally:
            for stream in (sys.stdout, sys.stderr):
                attempt(stream.flush)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    channel.send(event="ended", status=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Serve the requests of standard input until it ends.

    Arguments: the channel and where a stack is written at a fatal signal (file descriptors), and the parent's id.
    """
    channel, trace = Channel(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(int(sys.argv[3]))
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    null_handle = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_handle, 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=trace, all_threads=False)
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
            score.write("1000")  # the first to end where memory does
    except OSError:
        pass
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork: each child has its own
    job, forks = None, False
    for line in requests:
        request = json.loads(line)
        if job is None:
            try:
                job = CheckJob(request, channel)
                description = job.describe()
            except UserError as error:
                channel.send(event="refused", problem=str(error))
                return
            except BaseException as error:
                channel.send(event="raised", detail=describe(error))
                return
            if description["forks"]:
                _import_all()
                gc.freeze()  # so that children do not copy all memory when they collect garbage
            forks = description["forks"] and _is_single_threaded()
            channel.send(event="ready", **description)
            continue

        def serve(request: Event = request, job: CheckJob = job) -> None:
            try:
                torch.set_num_threads(threads)
                job.serve(request)
                channel.send(event="done")
            except BaseException as error:
                channel.send(event="raised", detail=describe(error))

        if forks:
            _forked(channel, serve)
        else:
            serve()
            channel.send(event="ended", status=0)


if __name__ == "__main__":
    main()
