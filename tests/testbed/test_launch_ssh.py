"""``hetero-megatron launch`` over hosts that are network namespaces, by sshd and by a stand-in for ssh."""

from __future__ import annotations

import signal
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.namespace_hosts import NamespaceHosts, missing
from tests.support.paths import ROOT
from tests.support.vendors import PLUGINS, build_emulated

pytestmark = [pytest.mark.testbed("hosts")]
PROGRAM = "import os; print({k: os.environ[k] for k in ('RANK', 'HETERO_NODE', 'WORLD_SIZE')}, flush=True)"


@pytest.fixture(params=["stand-in", pytest.param("sshd", marks=pytest.mark.slow)])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NamespaceHosts]:
    if reason := missing(request.param == "sshd"):
        pytest.skip(reason)
    with NamespaceHosts(tmp_path, 2, request.param == "sshd") as found:
        yield found


def launch(hosts: NamespaceHosts, cluster: Path, *more: str) -> list[str]:
    program = [sys.executable, "-m", "hetero_megatron.cli.main", "launch"]
    return [*program, "--cluster", str(cluster), "--ssh-command", hosts.ssh, "--grace", "5", *more]


def test_every_chip_is_a_rank_and_its_lines_say_which(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    cluster = hosts.cluster([2, 1])
    job = hosts.start(launch(hosts, cluster, "--log-dir", str(tmp_path / "logs"), "--", str(script)))
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, out + err
    said = [line for line in out.splitlines() if "HETERO_NODE" in line]
    for rank, node in enumerate(("host0", "host0", "host1")):
        mine = [line for line in said if f"[{node}] [rank {rank}]" in line]
        assert len(mine) == 1 and f"'HETERO_NODE': '{node}'" in mine[0] and "'WORLD_SIZE': '3'" in mine[0], said
    assert "'RANK': '2'" in (tmp_path / "logs" / "host1.log").read_text()
    assert hosts.no_orphans() == []


# What a second environment is: another interpreter, whose torch says to be another release for another vendor.
OTHER_TORCH = (
    "import site, sys, importlib.util as u; site.addsitedir({packages!r}); "
    "s = u.spec_from_file_location('torch.version', {packages!r} + '/torch/version.py'); m = u.module_from_spec(s); "
    "s.loader.exec_module(m); m.__version__ = '2.11.0+rocm7.1'; sys.modules['torch.version'] = m\n"
)


def other_environment(folder: Path) -> Path:
    """Its interpreter."""
    venv.create(folder, with_pip=False)
    own = next((folder / "lib").glob("python*")) / "site-packages"
    (own / "other.pth").write_text(OTHER_TORCH.format(packages=sysconfig.get_path("purelib")))
    made = own / "torch-2.11.0+rocm7.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+rocm7.1\n")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_hosts_of_two_vendors_train_from_two_environments(hosts: NamespaceHosts, tmp_path: Path) -> None:
    build_emulated()
    python, there = other_environment(tmp_path / "other env"), tmp_path / "own folder"
    there.mkdir()
    data = yaml.safe_load(hosts.cluster([1, 1]).read_text())
    data["nodes"][0] |= {"python": str(python), "directory": str(there)}
    data["nodes"][1]["chip"] = "device"
    data["chips"]["device"] = {
        **data["chips"]["core"], "vendor": "emulated", "host_bandwidth": "1 GB/s", "emulate": {"speed": 1.0},
    }  # fmt: skip
    data["launch"] = {"python": sys.executable, "directory": str(ROOT), "env": {
        "HETERO_PLUGINS": "hetero_emulated_vendor.plugin", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{PLUGINS / 'emulated_vendor'}",
    }}  # fmt: skip
    cluster = tmp_path / "unlike.yaml"
    cluster.write_text(yaml.safe_dump(data))
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({
        "version": 1, "seq_length": 32, "global_batch_size": 4, "schedule": "1f1b", "pipelines": [{
            "micro_batch_size": 1, "num_micro_batches": 4, "stages": [
                {"ranks": [0], "layers": [0, 3]},
                {"ranks": [1], "layers": [3, 6], "kernels": {"attention": "reference"}},
            ],
        }],
    }))  # fmt: skip
    words = ["--model", "tiny", "--mock-data", "--train-iters", "2", "--lr", "1e-3", "--log-interval", "1"]
    command = ["-m", "hetero_megatron.cli.main", "pretrain", "--plan", str(plan), "--cluster", str(cluster), *words]
    job = hosts.start(launch(hosts, cluster, "--", *command))
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, out + err
    assert "notice: launcher: torch: 2.11.0 on host0; 2.13.0 on host1" in out, out
    assert "done: 2 steps" in out and "island 0 with 1: bridge" in out, out
    assert hosts.no_orphans() == []


@pytest.mark.slow
def test_a_failure_on_one_host_ends_all(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--", str(script)))
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1, err  # torchrun's
    assert "host1 ended with exit code 1" in err
    assert hosts.no_orphans() == []


@pytest.mark.slow
def test_signals_reach_all_ranks(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'saved-' + os.environ['RANK']).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--log-dir", str(tmp_path), "--", str(script)))
    logs, end = [tmp_path / f"host{i}.log" for i in (0, 1)], time.monotonic() + 90
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert hosts.no_orphans() == []


def test_a_launcher_that_is_killed_leaves_nothing(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(600)")
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--", str(script)))
    assert job.stdout is not None
    while "ready" not in (line := job.stdout.readline()):
        assert line
    job.kill()
    job.wait()
    assert hosts.no_orphans() == []


def test_a_host_that_does_not_answer_is_named_before_anything_starts(hosts: NamespaceHosts, tmp_path: Path) -> None:
    hosts.power_off(1)
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--connect-timeout", "10", "--", "x.py"))
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2 and out == ""
    assert err.startswith("error: ") and "host1" in err and len(err.splitlines()) == 1
    assert hosts.no_orphans() == []


