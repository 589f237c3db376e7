"""CPU seconds of every test, which other jobs on a machine hardly change: ``pytest -p tests.support.cpu_seconds
--cpu-seconds DIR`` writes them, a file of JSON lines per worker; ``python -m tests.support.cpu_seconds DIR`` prints
the sums by file.

A test's seconds are those of its process, of the children that it waited for, and of those that live on, such as the
ranks that tests share (``tests/support/pool.py``), with its fixtures. What one imports counts for the first that needs
it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="DIR", help="write CPU and wall seconds of every test there")


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + seconds_of_children(str(os.getpid()))


def seconds_of_children(process: str) -> float:
    """Of all that it started, and so on, that live: servers that programs and shared ranks are forked from."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0.0
    return sum(seconds_of(child) + seconds_of_children(child) for child in found)


def seconds_of(process: str) -> float:
    """With those of its children that it waited for; 0 where it has ended."""
    try:
        after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    try:
        return (yield)
    finally:
        seconds = {"cpu": round(cpu_seconds() - cpu, 3), "wall": round(time.perf_counter() - wall, 3)}
        folder = item.config.getoption("--cpu-seconds")
        if folder is not None:  # at once: a run that is stopped has what it measured
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'all')}.jsonl").open("a") as file:
                file.write(json.dumps({"test": item.nodeid, **seconds}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--top", type=int, default=40, help="files with most CPU seconds (default: 40)")
    parser.add_argument("--tests", action="store_true", help="single tests instead of files")
    options = parser.parse_args()
    cpu, wall, tests = Counter[str](), Counter[str](), Counter[str]()
    for line in (line for file in options.folder.glob("*.jsonl") for line in file.read_text().splitlines()):
        row = json.loads(line)
        name = row["test"] if options.tests else row["test"].partition("::")[0]
        cpu[name] += row["cpu"]
        wall[name] += row["wall"]
        tests[name] += 1
    print(f"{sum(tests.values()):,} tests, {sum(cpu.values()):,.0f} CPU s, {sum(wall.values()):,.0f} wall s of workers")
    print(f"{'CPU s':>8} {'wall s':>8} {'tests':>6}")
    for name, seconds in cpu.most_common(options.top):
        print(f"{seconds:>8.1f} {wall[name]:>8.1f} {tests[name]:>6}  {name}")


if __name__ == "__main__":
    main()
