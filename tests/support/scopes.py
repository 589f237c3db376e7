"""Which slow tests one process of pytest-xdist runs, in their order (``make test-slow``: ``--dist loadscope``)."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

SCOPES = {
    "testbed": (  # of which there is one at a time, so that a second process would wait
        "tests/slow/test_cut_links.py", "tests/slow/test_island_faults.py", "tests/slow/test_island_jobs.py",
        "tests/slow/test_testbed_failures.py",
        "tests/slow/test_testbed_training.py", "tests/testbed/test_launch.py",
    ),
    "hosts": (  # likewise
        "tests/slow/test_elastic_hosts.py", "tests/slow/test_first_cluster.py", "tests/slow/test_lost_hosts.py",
        "tests/slow/test_slurm.py",
        "tests/testbed/test_launch_ssh.py",
    ),
    "an extension": ("tests/distributed/parallel/test_offload.py",),  # compiled once, for minutes
    "deadly kernels": ("tests/distributed/ops/test_conformance_process.py",),  # one long run, looked at by many tests
}  # fmt: skip
SCOPE_OF = {file: scope for scope, files in SCOPES.items() for file in files}


def scope_of(nodeid: str) -> str:
    """That of the table; of a command of the documents its page, as they go on from each other; else the test."""
    file, _, name = nodeid.partition("::")
    if name.startswith("test_block_runs["):
        return name.rpartition(":")[0]
    return SCOPE_OF.get(file, nodeid)


class Scopes(LoadScopeScheduling):  # type: ignore[misc]
    """Scopes of many tests first, then single tests in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
