"""Programs of the package without the seconds that their imports take: a server forks them from one process with torch.

``with serving(environment) as bin`` puts ``python``, ``hetero-megatron`` and ``torchrun`` into the folder ``bin``,
which run what those of ``.venv/bin`` run. What starts there is a client: it hands its words, folder, environment and
standard streams to the server, which forks the process that runs the script, the module (``-m``), the code (``-c``) or
what comes on stdin (``-``). The client passes signals on and ends as that process ends; where the client is killed, so
is the process. ``sys.executable`` is ``bin/python`` there: ranks that a program starts come the same way.

A client becomes a real interpreter wherever the fork could differ from one: other options, open files beside the
standard streams, or another value of a variable that is read while modules are imported. Not for programs of which
something asks for the process itself: its children, its cgroup, its cores, its network.
"""

from __future__ import annotations

import array
import marshal
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

NAMES = ("python", "hetero-megatron", "torchrun")
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "HF_", "TRITON_", "TORCHINDUCTOR", "HETERO_PLUGINS")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# By the server: what most programs import.
IMPORTED = (
    "torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch._dynamo",
    "hetero_megatron.cli.start", "hetero_megatron.cli.main", "hetero_megatron.cli.pretrain",
    "hetero_megatron.cli.pretrain", "hetero_megatron.cli.generate", "hetero_megatron.training.train",
    "hetero_megatron.training.export", "hetero_megatron.data.corpus", "hetero_megatron.plans.importers.megatron",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
LONGEST = 1 << 17  # bytes of a request: words and environment
# Isolated and without site-packages: some 40 ms.
CLIENT = """#!{python} -IS
import sys
sys.path.insert(0, {root!r})
from tests.support.quick_start import client
client({program!r}, {python!r}, {address!r}, {settings!r})
"""


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that modules may read while they are imported."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


@contextmanager
def serving(environment: Mapping[str, str]) -> Iterator[Path]:
    """The folder ``bin`` with the clients of a server in this environment; their programs end with this context.
    Where the kernel cannot do that, the interpreters themselves."""
    import subprocess
    import tempfile

    root = Path(__file__).parents[2]
    real = root / ".venv" / "bin"
    if not _waits_for_processes():
        yield real
        return
    folder = tempfile.TemporaryDirectory(prefix="quick")
    address, made = Path(folder.name, "server"), Path(folder.name, "bin")
    made.mkdir()
    for name in NAMES:
        program = "" if name == "python" else str(real / name)
        text = CLIENT.format(
            python=str(real / "python"), root=str(root), program=program, address=str(address),
            settings=settings_of(environment),
        )  # fmt: skip
        (made / name).write_text(text)
        (made / name).chmod(0o755)
    words = [str(real / "python"), str(root / "tests/support/quick_start.py"), str(address), str(made / "python")]
    server = subprocess.Popen(words, cwd=root, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield made
    finally:
        server.terminate()
        server.communicate()
        folder.cleanup()


def _waits_for_processes() -> bool:
    """Whether the kernel has what the server waits for processes with; some sandboxes have not."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def client(program: str, python: str, address: str, settings: Mapping[str, str]) -> NoReturn:
    """What a file of ``bin`` does. ``program``: the script that its name stands for; empty: an interpreter."""
    words = [program, *sys.argv[1:]] if program else sys.argv[1:]
    unbuffered = words[:1] == ["-u"]
    rest = words[1:] if unbuffered else words
    plain = bool(rest) and (rest[0] in ("-", "-m", "-c") or not rest[0].startswith("-"))
    others = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]  # one of them is that folder, closed now
    if not plain or len(others) > 1 or settings_of(os.environ) != settings:
        os.execv(python, [python, *words])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        server.connect(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST)
        request = marshal.dumps((rest, unbuffered, os.getcwd(), dict(os.environ)))
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        process = int(server.recv(64))
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = int(server.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(address: str, executable: str) -> None:
    """The server; and, in the processes that are forked from it, their programs."""
    import gc
    import multiprocessing.spawn  # noqa: F401  # it keeps the real interpreter, whose children are handed files

    sys.executable = executable
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # programs share these pages: no garbage collection writes to them
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        request = serve(listening)
    code = end_of(request)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)  # what the interpreter frees one by one is that of the whole server


def serve(listening: socket.socket) -> Any:
    """Returns in the processes of programs: their request."""
    parent = os.getppid()
    listening.settimeout(0.2)
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    while not ended and os.getppid() == parent:
        children_left()
        try:
            client, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, before)
            return keep(client)
        client.close()
    end = time.monotonic() + 2.0  # what has just ended is waited for, so that its seconds are known
    while children_left() and time.monotonic() < end:
        time.sleep(0.02)
    os._exit(0)


def children_left() -> bool:
    """Once those that have ended are waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def keep(client: socket.socket) -> Any:
    """In a process of its own: start the program of ``client``, and end it with the client or the server."""
    import select

    parent = os.getppid()
    client.setblocking(True)
    request, rights, _, _ = client.recvmsg(LONGEST, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i", rights[0][2])
    process = os.fork()
    if process == 0:
        client.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return marshal.loads(request)
    for stream in (*streams, 0, 1, 2):  # whoever reads them waits for their end
        os.close(stream)
    client.send(b"%d" % process)
    with open(os.pidfd_open(process)) as ended:
        ready: list[Any] = []
        while not ready and os.getppid() == parent:
            ready, _, _ = select.select([client, ended], [], [], 1.0)
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        client.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def end_of(request: Any) -> int:
    """The exit code of the program."""
    import atexit
    import threading

    try:
        run(*request)
        code: Any = None
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        return 1
    return (code or 0) & 0xFF


def run(words: list[str], unbuffered: bool, folder: str, environment: dict[str, str]) -> None:
    """What ``python WORDS`` runs."""
    import runpy

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    what, *rest = words
    if what == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")
    if what == "-c":
        code, name, sys.path[0] = rest.pop(0), "<string>", ""
    elif what == "-":
        code, name, sys.path[0] = sys.stdin.read(), "<stdin>", ""
    else:
        code, name, sys.path[0] = Path(what).read_text("utf-8"), what, str(Path(what).absolute().parent)
        module.__file__ = str(Path(what).absolute())
    sys.argv = [what, *rest]
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    # As a module under its name: whoever records a stack (torchrun does) looks through all modules for files of frames.
    import_module("tests.support.quick_start").main(*sys.argv[1:])
