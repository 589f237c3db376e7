"""The heap keeps what it has: page faults of a process of its own, as the kernel counts them."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

WORK = """
import resource, sys, torch
from hetero_megatron.platform.platform import keep_freed_memory

how, mib, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(mib << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.ones(1)
if how != "plain" and not keep_freed_memory():
    sys.exit("no mallopt")
print(*(faults() for _ in range(rounds)))
"""


def _faults(how: str, mib: int, rounds: int) -> tuple[list[int], int]:
    """Of tensors of so many MiB made and freed one after the other; and how many pages one has."""
    command = [sys.executable, "-c", WORK, how, str(mib), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "no mallopt" in done.stderr:
        pytest.skip("the C library has no mallopt")
    assert not done.returncode, done.stderr
    return [int(word) for word in done.stdout.split()], (mib << 20) // resource.getpagesize()


@pytest.mark.slow
def test_memory_that_was_freed_is_used_again() -> None:
    given_back, pages = _faults("plain", 32, 32)
    if sum(given_back) < 24 * pages:
        pytest.skip("this system gives memory in larger pages, or keeps it by itself")
    kept, _ = _faults("kept", 32, 32)
    # Objects that outlive a tensor lie in its place for some rounds, and the next one does not fit there.
    assert sum(kept) < 16 * pages, kept
