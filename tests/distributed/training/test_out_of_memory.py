"""Memory that runs out is one sentence and exit code 2, wherever it happens."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.checkpoint.directory import CheckpointDirectory
from hetero_megatron.checkpoint.native import CheckpointSaver
from hetero_megatron.checkpoint.storage import BoxReader, BoxWriter
from hetero_megatron.comm import CommError
from hetero_megatron.errors import UserError
from hetero_megatron.utils.out_of_memory import out_of_memory
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT
from tests.support.tiny_checkpoint import alone, boxed, load, save, values

RUN = ["pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "1024", "--num-attention-heads", "8", "--mock-data"]
RUN += ["--max-position-embeddings", "2048", "--seq-length", "1024", "--vocab-size", "32000", "--micro-batch-size", "2"]
RUN += ["--train-iters", "1", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("gib", "words", "says"),
    [
        (0.4, RUN, "error: rank 0 is out of host memory. Accepted: "),  # while libraries are loaded
        (0.9, RUN, " more were asked for. Accepted: a smaller --micro-batch-size"),
    ],
)
def test_a_limit_on_memory_is_a_refusal(gib: float, words: list[str], says: str) -> None:
    limit = int(gib * 2**30)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_what_libraries_raise_is_recognised() -> None:
    asked = 1 << 62
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(asked, dtype=torch.int8)
    assert "rank 3 is out of host memory: 4 EiB more were asked for" in str(out_of_memory(torchs.value, 3))
    with pytest.raises(MemoryError) as pythons:
        bytearray(asked)
    assert "rank 3 is out of host memory. Accepted: " in str(out_of_memory(pythons.value, 3))
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50)
    assert ": 8 PiB more were asked for" in str(out_of_memory(numpys.value, 0))
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 79 GiB")
    said = str(out_of_memory(cuda, 1))
    assert "rank 1 is out of memory of its accelerator: 2.5 GiB more were asked for" in said and "offload" in said
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    try:
        raise ValueError("no tensor") from MemoryError()
    except ValueError as error:
        assert out_of_memory(error), "behind another error"


def too_much(*_: Any) -> Any:
    return torch.empty(1 << 62, dtype=torch.int8)


def test_a_save_or_load_that_is_out_of_memory_is_no_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks would tell each other of it, and where only this one knows."""
    says = "rank 0 is out of host memory: 4 EiB more were asked for"
    saver = CheckpointSaver(str(tmp_path / "run"), alone(), asynchronous=False)
    with pytest.raises(UserError, match=says):
        saver.save(1, boxed(values(1)), {"step": 1, "seed": 1}, {}, too_much)
    save(tmp_path / "run", 2, 2)
    monkeypatch.setattr(BoxReader, "read_data", too_much)
    with pytest.raises(UserError, match=says):
        load(tmp_path / "run")
    monkeypatch.setattr(BoxWriter, "write_data", too_much)
    with pytest.raises(UserError, match=says):
        save(tmp_path / "run", 3, 3)
    assert CheckpointDirectory(tmp_path / "run").held() == [2]


def test_a_transfer_that_is_out_of_memory_is_no_lost_peer() -> None:
    comm = alone().comm
    with pytest.raises(RuntimeError) as torchs:
        too_much()
    assert "rank 0 is out of host memory" in str(comm.failure((1,), 1.0, torchs.value))
    lost = comm.failure((1,), 1.0, RuntimeError("Connection closed by peer"))
    assert isinstance(lost, CommError) and "for rank 1 and got no answer" in str(lost)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "full"), ImportError("no x")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert out_of_memory(error) is None
