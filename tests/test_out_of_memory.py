"""Memory that runs out is one sentence and exit code 2, wherever it happens."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from hetero_megatron.training.out_of_memory import out_of_memory
from tests.test_end_to_end import ENVIRONMENT, ROOT

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
    assert "rank 3 is out of host memory: 4 EiB more were asked for" in out_of_memory(torchs.value, "3")
    with pytest.raises(MemoryError) as pythons:
        bytearray(asked)
    assert "rank 3 is out of host memory. Accepted: " in out_of_memory(pythons.value, "3")
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50)
    assert ": 8 PiB more were asked for" in out_of_memory(numpys.value, "0")
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 79 GiB")
    said = out_of_memory(cuda, "1")
    assert "rank 1 is out of memory of its accelerator: 2.5 GiB more were asked for" in said and "offload" in said
    assert out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    try:
        raise ValueError("no tensor") from MemoryError()
    except ValueError as error:
        assert out_of_memory(error), "behind another error"


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "full"), ImportError("no x")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert out_of_memory(error) == ""
