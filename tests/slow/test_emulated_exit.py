"""The end of a process on the emulated device: what its streams have to do is done before the interpreter goes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.vendors import PLUGINS, build_emulated

SCRIPT = """
import atexit, os, time
state = {}
atexit.register(lambda: print("settled", state["event"].query() if "event" in state else True))  # runs last
import torch
from hetero_megatron.comm import start_comm
from hetero_megatron.platform import choose_platform
from hetero_megatron.platform.plugins import load_plugins

rank = int(os.environ["RANK"])
comm = start_comm(choose_platform(load_plugins().platforms.values(), "emulated_vendor", None, rank), 60)
comm.connect([1 - rank])
x = torch.zeros(1 << 20, device=comm.device)
if rank:
    time.sleep(1)  # the other process has left its last line by then
    comm.isend(x, 0, 0).wait()
    torch.emu.synchronize()
    time.sleep(1)
else:
    comm.irecv(x, 1, 0).wait()
    for _ in range(50):
        x.mul_(1.5).add_(1)
    state["event"] = torch.Event("emu")
    state["event"].record()
    print("queued", state["event"].query())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_queued_work_ends_before_the_interpreter_does() -> None:
    build_emulated()
    port = free_port()
    environment = {
        **os.environ, "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], ended
    assert "queued False" in ended[0][0] and "settled True" in ended[0][0], ended[0]
