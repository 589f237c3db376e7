"""Emulated clusters, and jobs on them: shared by the benchmarks that run inside the testbed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


def emulated_cluster(
    groups: list[tuple[str, int, int, float, str]], inter: str = "50 MB/s", **pairs: str
) -> dict[str, Any]:
    """Groups are (name, nodes, chips per node, speed, memory); pairs are a_b="25 MB/s"."""
    return {
        "version": 1,
        "nodes": [{"name": n, "count": c, "chips_per_node": k, "chip": f"chip-{n}"} for n, c, k, _, _ in groups],
        "chips": {f"chip-{n}": {"memory": m, "dtypes": ["fp32"], "emulate": {"speed": s}} for n, _, _, s, m in groups},
        "links": {
            "intra_node": {"bandwidth": "1 GB/s"},
            "inter_node": {"bandwidth": inter},
            "pairs": [{"between": key.split("_"), "bandwidth": rate} for key, rate in pairs.items()],
        },
    }


def speed_ceiling(cluster: dict[str, Any]) -> float:
    """mean(speed) / min(speed) over the chips: how much faster than equal shares unequal ones can be."""
    chips = {name: chip["emulate"]["speed"] for name, chip in cluster["chips"].items()}
    speeds = [chips[g["chip"]] for g in cluster["nodes"] for _ in range(g["count"] * g["chips_per_node"])]
    return float(sum(speeds) / len(speeds) / min(speeds))


def run_testbed(
    name: str, cluster: dict[str, Any], chips: str, links: str, job: Sequence[str | Path]
) -> tuple[dict[str, Any], str]:
    """Run a Python job on every rank of a cluster: what the launcher wrote down (``testbed.json``), and the output.

    Raises:
        SystemExit: it failed; with the ends of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "cluster.json").write_text(json.dumps(cluster))
        command = [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run", "--chips", chips]
        command += ["--links", links, "--cluster", str(path / "cluster.json"), "--log-dir", str(path / "log"), "--"]
        done = subprocess.run([*command, sys.executable, *map(str, job)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return json.loads((path / "log" / "testbed.json").read_text()), done.stdout


def undisturbed(measure: Callable[[], tuple[T, bool]], attempts: int = 3) -> tuple[T, bool]:
    """What ``measure`` found and whether others disturbed it; again, if they did, up to ``attempts`` times in all."""
    for _ in range(attempts):
        found, disturbed = measure()
        if not disturbed:
            break
    return found, disturbed


def run_job(
    name: str, job: str, cluster: dict[str, Any], work: dict[str, Any], chips: str, links: str, verbose: bool = False
) -> dict[str, Any]:
    """Run ``benchmarks/<job>`` on every rank of a cluster; what its rank 0 wrote to ``out``, ``disturbed`` and
    ``invalid``.

    The job's argument is a JSON file with ``work``, ``cluster`` and ``out``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "work.json").write_text(json.dumps({**work, "cluster": cluster, "out": str(path / "out.json")}))
        testbed, said = run_testbed(name, cluster, chips, links, [ROOT / "benchmarks" / job, path / "work.json"])
        if verbose:
            print(said, flush=True)
        found = json.loads((path / "out.json").read_text())
        return {**found, "disturbed": testbed["disturbed"], "invalid": testbed.get("invalid", False)}


def notes(found: dict[str, Any]) -> str:
    """How trustworthy a run is: calibration time, the emulated clock's own check, foreign load."""
    lines = [f"calibrated in {found['calibration_seconds']:.0f} s"]
    if found["clock"]:
        lines.append(f"late {found['clock']['late']:.1%}, overrun {found['clock']['overrun']:.1%}")
    if found["invalid"]:
        lines.append("INVALID: a rank could not keep up with its emulated chip")
    if found["disturbed"]:
        lines.append("DISTURBED by other work on the machine")
    return "; ".join(lines)
