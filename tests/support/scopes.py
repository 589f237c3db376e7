"""Which slow tests one process of pytest-xdist runs, in their order (``make test-slow``: ``--dist loadscope``)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Of what emulates a cluster there is one at a time, a testbed or namespaces as hosts: a second process would wait for
# the first. They wait for emulated clocks, links and time-outs, so that the other processes have the cores meanwhile.
CLUSTERS = "emulated clusters"
SCOPES = {
    CLUSTERS: (
        "tests/slow/test_cut_links.py", "tests/slow/test_island_faults.py", "tests/slow/test_island_jobs.py",
        "tests/slow/test_testbed_failures.py",
        "tests/slow/test_testbed_training.py", "tests/testbed/test_launch.py",
        "tests/slow/test_elastic_hosts.py", "tests/slow/test_first_cluster.py", "tests/slow/test_lost_hosts.py",
        "tests/slow/test_slurm.py",
        "tests/testbed/test_launch_ssh.py",
    ),
    "an extension": ("tests/distributed/parallel/test_offload.py",),  # compiled once, for minutes
    "deadly kernels": ("tests/distributed/ops/test_conformance_process.py",),  # one long run, looked at by many tests
}  # fmt: skip
# Of the scopes that take longest, on two cores beside other work (load 6 to 10; idle about half of it): these start
# first. Measured with ``tests/support/cpu_seconds.py``; they need not be exact.
SECONDS = {
    CLUSTERS: 1059,
    "test_block_runs[README.md": 272,
    "deadly kernels": 174,
    "test_block_runs[docs/planner.md": 140,
    "test_block_runs[docs/training.md": 93,
    "tests/slow/test_wheel.py::test_the_wheel_alone_trains_plans_and_writes_a_plugin": 93,
    "test_block_runs[docs/vendor_plugin.md": 88,
    "test_block_runs[docs/first_plugin.md": 81,
    "tests/slow/test_first_run.py::test_every_part_runs_and_is_on_the_page[emulated_vendor]": 79,
    "tests/unit/planner/test_search.py::test_more_nodes_are_never_slower": 78,
    "tests/distributed/training/test_elastic_torchrun.py::test_a_killed_rank_and_a_host_that_leaves": 72,
    "tests/slow/test_fresh_install.py::test_fresh_clone": 72,
    "tests/distributed/training/test_elastic.py::test_random_events[1]": 64,
    "tests/distributed/training/test_kernel_training.py::test_the_default_compiler_takes_the_kernels_of_a_plugin": 62,
    "tests/distributed/training/test_elastic.py::test_whatever_happens[frozen]": 59,
    "test_block_runs[docs/elastic.md": 58,
    "tests/distributed/training/test_supervise.py::test_a_lost_node[19-2-replan]": 58,
    "tests/unit/training/test_alignment.py::test_the_flags_of_a_run": 58,
    "tests/unit/planner/test_islands_apart.py::test_the_command_writes_the_faster_plan": 52,
    "tests/unit/schedule/test_adaptive_chunks.py::"
    "test_on_random_pipelines_it_is_never_slower_than_others_and_never_above_the_cap": 52,
    "tests/unit/planner/test_runtimes.py::test_commands": 52,
}  # fmt: skip
SCOPE_OF = {file: scope for scope, files in SCOPES.items() for file in files}


def scope_of(nodeid: str) -> str:
    """That of the table; of a command of the documents its page, as they go on from each other; else the test."""
    file, _, name = nodeid.partition("::")
    if name.startswith("test_block_runs["):
        return name.rpartition(":")[0]
    return SCOPE_OF.get(file, nodeid)


class LongestFirst(OrderedDict[str, dict[str, bool]]):
    """Scopes with their tests, of which the next one is the longest by ``SECONDS``, or by its number of tests."""

    def popitem(self, last: bool = False) -> tuple[str, dict[str, bool]]:
        scope = max(self, key=lambda scope: (SECONDS.get(scope, 0), len(self[scope])))  # of equal ones the first
        return scope, self.pop(scope)


class Scopes(LoadScopeScheduling):  # type: ignore[misc]
    """The longest scopes first, so that no process is left with one of them at the end; then those of many tests, then
    single tests in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self.workqueue = LongestFirst()

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
