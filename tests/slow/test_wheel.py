"""The wheel and the sdist, each built from a clean copy; the wheel alone, in a bare environment, does all there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NEEDED_BYTES = 4 * 2**30  # a CPU build of torch and what else is required

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CLUSTER = """\
version: 1
nodes:
  - {name: big, chip: large}
  - {name: small, chip: little}
chips:
  large: {memory: 2 GiB, tflops: {fp32: 1}, memory_bandwidth: 20 GB/s}
  little: {memory: 1 GiB, tflops: {fp32: 0.5}, memory_bandwidth: 10 GB/s}
links:
  intra_node: {bandwidth: 2 GB/s, latency: 20 us}
  inter_node: {bandwidth: 100 MB/s, latency: 100 us}
"""


def run(command: list[str], folder: Path) -> str:
    """Standard output; outside of the repository, and with none of its environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def words(text: str) -> list[str]:
    return text.split()


def build(kind: str, source: Path, out: Path) -> Path:
    """``wheel`` or ``sdist`` of a folder, by the build backend that pyproject.toml names."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run([sys.executable, "-c", code], source)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the files that git knows: what lies around in a working copy must not be what makes it work."""
    folder = tmp_path_factory.mktemp("build")
    run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], folder)
    return build("wheel", folder / "clone", folder / "wheel")


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", wheel.parent.parent / "clone", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert contents(again) == contents(wheel)
    packages = {name.split("/")[0] for name in contents(wheel)}
    assert packages == {"hetero_megatron", "hetero_kernels", "hetero_plugins"}


def test_the_wheel_alone_trains_plans_and_writes_a_plugin(wheel: Path, tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < NEEDED_BYTES:
        pytest.skip(f"less than {NEEDED_BYTES // 2**30} GiB free for a second environment")
    run([sys.executable, "-m", "venv", "bare"], tmp_path)
    bare = tmp_path / "bare" / "bin"
    try:
        pip = [str(bare / "pip"), "install", "-q", "--no-compile"]  # most modules are never imported
        run([*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[planner]"], tmp_path)
        hetero = str(bare / "hetero-megatron")
        sizes = words("--model tiny --seq-length 64 --micro-batch-size 2 --train-iters 2 --lr 1e-3")
        corpus = words("--data-path stdlib --split 1 --save run --load run")
        run([hetero, "pretrain", *sizes, *corpus], tmp_path)
        assert (tmp_path / "run" / "latest").exists()
        two = [str(bare / "torchrun"), *words("--nproc-per-node 2 -m hetero_megatron pretrain --mock-data"), *sizes]
        run([*two, "--tensor-model-parallel-size", "2", "--sequence-parallel"], tmp_path)
        (tmp_path / "cluster.yaml").write_text(CLUSTER)
        task = words("--seq-length 64 --global-batch-size 8 --dtype fp32 --out plan.yaml")
        run([hetero, "plan", "--model", "tiny", "--cluster", "cluster.yaml", *task], tmp_path)
        run([hetero, *words("pretrain --plan plan.yaml --model tiny --dry-run --as-rank 0")], tmp_path)
        (tmp_path / "text.jsonl").write_text('{"text": "words"}\n' * 50)
        tool = words("--input text.jsonl --output-prefix text --tokenizer-type ByteTokenizer --append-eod --workers 2")
        run([hetero, "preprocess", *tool], tmp_path)
        assert (tmp_path / "text_text_document.bin").exists()
        run([hetero, "plugins", "new", "acme"], tmp_path)
        run([*pip, "--no-deps", "./acme"], tmp_path)
        run([hetero, "plugins", "check", "acme", "--quick"], tmp_path)
    finally:
        shutil.rmtree(tmp_path / "bare", ignore_errors=True)
