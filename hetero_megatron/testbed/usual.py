"""How fast a core of this machine usually is: the unit of speeds under ``soft``, kept between runs.

Calibrations and the runs that are compared with them must mean the same by "speed 0.5", although the machine may have
become slower meanwhile (:mod:`hetero_megatron.comm.yardstick`). So the first one measures the unit and all later ones
use it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetero_megatron.testbed.settings import Settings
from hetero_megatron.testbed.state import write_json

SECONDS = 2.0  # of reading
WORK = "work 3"  # which piece of work is read: another one has another unit


def with_unit(settings: Settings) -> Settings:
    """The settings, with what speed 1 means where that is not a constant."""
    if settings.chips != "soft":
        return settings
    usual, path = unit_of_speed()
    kept = f"kept in {path}" if path else "measured now; it cannot be kept, so other runs are not comparable"
    note = f"chips: speed 1 is a core whose yardstick takes {usual * 1e3:.3g} ms ({kept})"
    return replace(settings, usual=usual, notes=(*settings.notes, note))


def unit_of_speed() -> tuple[float, Path | None]:
    """CPU seconds that a yardstick reading usually takes here, and the file that remembers it; None: it cannot be."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path, key = Path(base) / "hetero_megatron" / "yardstick.json", _key()
    known: dict[str, float] = {}
    with suppress(OSError, ValueError):
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    if isinstance(found := known.get(key), float) and 0.0 < found < 1.0:
        return found, path
    found = _measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, key: found})
    except OSError:
        return found, None
    return found, path


def _measure() -> float:
    """By a process of its own: the launcher does not import torch."""
    script = f"from hetero_megatron.comm.yardstick import usual_reading; print(usual_reading({SECONDS}))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _key() -> str:
    """Of this processor, as a home may be shared by unlike machines, and of the piece of work."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {WORK}"
    return f"{platform.processor() or platform.machine()}, {WORK}"
