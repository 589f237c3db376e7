"""Programs forked by a server that tests share: the same as in an interpreter of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.selection import each

SHOWS = "import os, sys; print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ.get('ONE'), flush=True)\n"
WAYS = (
    "{python} -c \"$SHOWS\" a 'b c'",
    'cd docs; echo "$SHOWS" | {python} - a',
    'echo "$SHOWS" > $dir/shows.py; ONE=1 {python} $dir/shows.py --x; ONE=2 {python} -u $dir/shows.py',
    'cd $dir; mkdir package; echo "$SHOWS" > package/__main__.py; {python} -m package 1',
    "{python} -c 'import sys; sys.exit(3)'; echo $?; {python} -c 'exit(\"why\")' 2>&1; echo $?",
    "{python} -c 'import os; os.kill(os.getpid(), 9)'; echo $?; {python} -c 'raise KeyError(1)' 2> /dev/null; echo $?",
    "{python} -c 'import sys; print(input() + input(), file=sys.stderr)' <<< $'a\\nb' 2>&1 | cat",
    'OMP_NUM_THREADS=2 {python} -c "import os; print(os.cpu_count(), os.environ[\'OMP_NUM_THREADS\'])"',
    '{python} -S -c "import sys; print(sys.flags.no_site)"',
    "PYTHONPATH=$dir {python} -c 'import sys; print(sys.path[1])'",
)


@pytest.mark.slow
@each("way", WAYS)
def test_a_program_is_what_it_is_in_an_interpreter(forked_programs: Path, tmp_path: Path, way: str) -> None:
    printed = []
    for python in (ROOT / ".venv/bin/python", forked_programs / "python"):
        folder = tmp_path / "dir"
        folder.mkdir()
        environment = {**os.environ, "SHOWS": SHOWS, "dir": str(folder)}
        done = subprocess.run(["bash", "-c", way.format(python=python)], cwd=ROOT, env=environment, capture_output=True)
        printed.append((done.stdout, done.returncode))
        shutil.rmtree(folder)
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_signals_reach_the_program_and_it_ends_with_its_client(forked_programs: Path) -> None:
    code = "import os, time, signal\nsignal.signal(15, lambda *_: print('told', flush=True))\n"
    code += "print(os.getpid(), flush=True)\ntime.sleep(600)"
    client = subprocess.Popen([forked_programs / "python", "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    program = int(client.stdout.readline())
    assert program != client.pid
    client.send_signal(signal.SIGTERM)
    assert client.stdout.readline() == "told\n"
    client.kill()
    assert client.stdout.read() == ""  # at the end of the program
    client.wait()
