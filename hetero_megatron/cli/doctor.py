"""``hetero-megatron doctor``: what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.output import print_json
from hetero_megatron.cluster.catalogue import CHIPS, markdown
from hetero_megatron.training.exit import import_torch
from hetero_megatron.utils.text import plural, word

OK, OPTIONAL, BROKEN = "ok", "missing (optional)", "MISSING"


@dataclass(frozen=True)
class DoctorLine:
    """One line of the report: name, status, finding, and how to fix it."""

    name: str
    status: str
    found: str
    remedy: str = ""


def examine() -> list[DoctorLine]:
    """Examine everything without changes and without starting an accelerator."""
    checks: list[Callable[[], DoctorLine]] = [_python, _torch, _compiler, _cores, _memory, _loopback]
    packages = {
        "numpy": ("", True), "yaml": ("plans and clusters", True), "safetensors": ("Hugging Face weights", False),
        "transformers": ("Hugging Face tokenizers", False), "datasets": ("parquet and streaming data", False),
        "tensorboard": ("--tensorboard-dir", False), "wandb": ("--wandb-project", False),
        "mlflow": ("--mlflow-experiment", False),
        "triton": ("kernels for accelerators", False), "deepspeed": ("offloaded optimizers", False),
    }  # fmt: skip
    findings = [check() for check in checks] + _testbed()
    return findings + [_package(n, use, needed) for n, (use, needed) in packages.items()]


def _python() -> DoctorLine:
    version = platform.python_version()
    recent = sys.version_info >= (3, 11)
    return DoctorLine(
        "python", OK if recent else BROKEN, f"{version} ({sys.executable})", "" if recent else "3.11 or later"
    )


def _torch() -> DoctorLine:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return DoctorLine("torch", BROKEN, "not installed", "make env")
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 11):
        return DoctorLine("torch", BROKEN, version, "2.11 or later: make env")
    import_torch()
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chips = f", {torch.accelerator.device_count()} x {kind}" if kind is not None else ", CPU only"
    dist = torch.distributed  # lint: allow distributed (it is only asked what this build has)
    gloo = dist.is_available() and dist.is_gloo_available()
    remedy = "" if gloo else "a build of torch with gloo: make env"
    return DoctorLine("torch", OK if gloo else BROKEN, version + chips + ("" if gloo else ", no gloo"), remedy)


def _compiler() -> DoctorLine:
    path = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if path is None:
        return DoctorLine("C compiler", OPTIONAL, "none", "apt-get install gcc (torch.compile and triton want one)")
    run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return DoctorLine("C compiler", OK, (run.stdout.splitlines() or [path])[0])


def _cores() -> DoctorLine:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "not set (torchrun sets 1)")
    return DoctorLine("cores", OK, f"{usable} usable; OMP_NUM_THREADS {threads}")


def _memory() -> DoctorLine:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    except (OSError, ValueError, IndexError):
        return DoctorLine("memory", OK, "unknown on this system")
    free, total = sizes.get("MemAvailable", 0) / 2**30, sizes.get("MemTotal", 0) / 2**30
    enough = free >= 1.0
    remedy = "" if enough else "free some: a rank of the demo takes about 0.4 GiB"
    return DoctorLine("memory", OK if enough else BROKEN, f"{free:.1f} of {total:.1f} GiB available", remedy)


def _loopback() -> DoctorLine:
    import socket

    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return DoctorLine("loopback network", BROKEN, str(error), "ip link set lo up")
    return DoctorLine("loopback network", OK, "127.0.0.1")


def _testbed() -> list[DoctorLine]:
    """What `hetero-megatron testbed` can do here; without any of it there are still soft chips and paced links."""
    from hetero_megatron.testbed.machine import MODULES
    from hetero_megatron.testbed.machine import examine as examine_machine
    from hetero_megatron.testbed.settings import SHARE

    machine = examine_machine()
    need = {"namespaces": machine.no_namespaces(), "memory": machine.no_memory_limit()}
    remedies = {
        "not root": "run as root; without it: --chips clock or soft, --links paced",
        "installed": "apt-get install iproute2",
        "kernel": "--links paced, or what testbed kernel says",
        "container": "start the container with --privileged, or --links paced",
        "cgroup": "mount cgroups (v1 or v2) writable; without them no --memory-limit",
    }
    lines = []
    for ability, why in need.items():
        remedy = next((text for word, text in remedies.items() if word in why), "--links paced") if why else ""
        version = machine.memory_groups if ability == "memory" else 0
        possible = "possible" + (f" (cgroups v{version})" if version else "")
        lines.append(DoctorLine(f"testbed {ability}", OPTIONAL if why else OK, why or possible, remedy))
    if machine.lacks is None:
        lines.append(DoctorLine("testbed kernel", OPTIONAL, "not tried", "needs root, ip and tc"))
    else:
        missing = f"lacks {', '.join(machine.lacks)}" if machine.lacks else ", ".join(MODULES)
        modules = " ".join(MODULES[name] for name in machine.lacks)
        remedy = f"modprobe {modules}, or a kernel that has them" if machine.lacks else ""
        lines.append(DoctorLine("testbed kernel", OPTIONAL if machine.lacks else OK, missing, remedy))
    cores = len(machine.cores)
    few = "" if cores > 1 else "two cores or more: ranks that share one disturb each other"
    speed = f"{cores} cores: emulated chips may be as fast as {SHARE * cores:g} cores together"
    return [*lines, DoctorLine("testbed cores", OPTIONAL if few else OK, speed, few)]


def _package(name: str, use: str, needed: bool) -> DoctorLine:
    if importlib.util.find_spec(name) is None:
        use_text = f" (for {use})" if use else ""
        remedy = "make env" if needed else f"pip install {name}{use_text}"
        return DoctorLine(name, BROKEN if needed else OPTIONAL, "not installed", remedy)
    try:
        version = importlib.metadata.version({"yaml": "PyYAML"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return DoctorLine(name, OK, version)


def main(argv: Sequence[str]) -> int:
    """Print the findings (``--json``: as one object), or the known chips; 1 if something needed is missing."""
    parser = ArgumentParser("doctor", "What this machine has, what is missing, how to mend it. Nothing is changed.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    chips_help = "print the chips that cluster files may name, with data-sheet values and their sources, instead"
    parser.add_argument("--chips", action="store_true", help=chips_help)
    options = parser.parse_args(list(argv))
    if options.chips:
        chips = {name: asdict(chip) for name, chip in CHIPS.items()}
        print_json(chips) if options.json else print(markdown())
        return 0
    findings = examine()
    broken = [f for f in findings if f.status == BROKEN]
    if options.json:
        print_json({"ok": not broken, "findings": [asdict(f) for f in findings]})
        return 1 if broken else 0
    for finding in findings:
        mend = f"  -> {finding.remedy}" if finding.remedy else ""
        print(f"{finding.name:<17} {finding.status:<19} {finding.found}{mend}")
    missing = f"{plural(len(broken), 'needed thing')} {word(len(broken), 'is')} missing"
    print("\n" + (missing if broken else "everything that is needed is here"))
    return 1 if broken else 0
