"""``run --elastic`` and ``pretrain_gpt.py --elastic`` as workers of torchrun: the first one of each host is its agent,
the others wait; see :mod:`~hetero_megatron.launch.torchrun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.cli.log import say_error
from hetero_megatron.cli.run_elastic import QUIET
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.launch.supervise import PEER_ERROR, USER_ERROR
from hetero_megatron.launch.waiting_workers import AgentEnd, await_agent
from hetero_megatron.training.exit import end_process, end_with_parent

if TYPE_CHECKING:
    from hetero_megatron.launch.attached import Attached
    from hetero_megatron.launch.torchrun import HostRecords
    from hetero_megatron.training.config import RunConfig

    # Of ``cli.run``: (options, fallback plans, flags of pretrain_gpt.py); its run, given the hosts there are.
    Parse = Callable[[Sequence[str]], tuple[dict[str, str], list[Path], list[str]]]
    Launch = Callable[[Sequence[str], Callable[[RunConfig], Attached]], int]

_NOT_BESIDE = ("--join", "--testbed", "--via")
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT")  # fmt: skip


def check_worker(argv: Sequence[str]) -> None:
    """UserError: ``torchrun … -m hetero_megatron run …`` with flags that are for one process."""
    options = [word.partition("=")[0] for word in argv[: argv.index("--") if "--" in argv else None]]
    for name in _NOT_BESIDE:
        if name in options:
            raise UserError("torchrun has started this process as a worker", field=name,
                            accepted="without torchrun, once on this host")  # fmt: skip
    if "--elastic" not in options:
        raise UserError("torchrun has started it as one of several workers, but it starts all ranks by itself",
                        field="hetero-megatron run", accepted="--elastic beside it, or without torchrun")  # fmt: skip


def run_words(argv: Sequence[str]) -> list[str]:
    """Those of ``torchrun … pretrain_gpt.py --elastic …`` as words of ``hetero-megatron run``."""
    files: dict[str, str] = {}
    words, rest = list[str](), list(argv)
    while rest:
        word = rest.pop(0)
        name, separator, value = word.partition("=")
        if name in ("--plan", "--cluster") and (separator or rest):
            files[name] = value if separator else rest.pop(0)
        elif name != "--elastic":
            words.append(word)
    with_fallbacks = "torchrun ... -m hetero_megatron run --elastic --fallback-plan FILE ... -- these flags"
    for name, use in (("--plan", "that the ranks begin with"), ("--cluster", "for which the plans after a loss are")):
        if name not in files:
            accepted = f"FILE, {use}" + (f"; or {with_fallbacks}" if name == "--cluster" else "")
            raise UserError("missing beside --elastic under torchrun", field=name, accepted=accepted)
    given = [word for name, file in files.items() for word in (name, file)]
    return ["--elastic", *given, "--", *words]


def work(argv: Sequence[str], parse: Parse, launch: Launch, program: Sequence[str]) -> int:
    """A worker, to its end; that of the first one of a host ends the process.

    Args:
        argv: of ``hetero-megatron run``.
        program: what starts a rank.

    Returns:
        the exit code, which is that of its host's agent.
    """
    end_with_parent()
    launcher = read_launcher()
    if launcher.local_rank is None or launcher.local_world_size is None:
        raise UserError("not set", field="LOCAL_RANK and LOCAL_WORLD_SIZE", accepted="as torchrun sets them")
    if launcher.local_rank:
        return await_agent(launcher.restarts, PEER_ERROR)
    end, code = AgentEnd(launcher.restarts, launcher.local_world_size - 1), PEER_ERROR
    environment = dict(os.environ)  # torchrun's, with its file for errors
    for name in (*_OURS, *(name for name in environment if name.startswith(("TORCHELASTIC_", "ROLE_")))):
        os.environ.pop(name, None)  # the ranks get theirs
    os.environ.setdefault(*QUIET)
    from hetero_megatron.comm.job_store import StoreGone

    try:
        code = _agent(argv, launcher, parse, launch, program)
    except UserError as error:
        say_error(str(error), environment)
        code = USER_ERROR
    except StoreGone as error:
        say_error(f"torchrun's store is gone: {error}", environment)
    finally:
        end.tell(code)
    end_process(code)


def _agent(
    argv: Sequence[str], launcher: LauncherEnvironment, parse: Parse, launch: Launch, program: Sequence[str]
) -> int:
    from hetero_megatron.comm.job_store import StoreGone
    from hetero_megatron.launch.joining import JobFile, Joining
    from hetero_megatron.launch.torchrun import HostOffer, HostRecords, node_of

    assert launcher.local_world_size is not None
    options, _, words = parse(argv)
    records, node = HostRecords(launcher), node_of(launcher, "--cluster" in options)
    offer = HostOffer(node, launcher.rank, launcher.local_world_size)
    if launcher.rank == 0:
        records.offer(offer)
        return _launch(argv, launcher, records, options.get("--address"), launch)
    meeting = records.meet(offer)
    plan, cluster = (str(Path(options[name]).absolute()) if name in options else "" for name in ("--plan", "--cluster"))
    words = [*words, "--elastic"]
    job = JobFile(meeting.host, meeting.port, meeting.secret, plan, cluster, words, str(Path.cwd()))
    log: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found = ("torchrun", node)
    try:
        return Joining(job, node, launcher.local_world_size, None, program, log, found=found, stays=True).run()
    except UserError as error:
        with suppress(StoreGone):
            records.fail(node, " ".join(str(error).split()))
        raise


def _launch(
    argv: Sequence[str], launcher: LauncherEnvironment, records: HostRecords, address: str | None, launch: Launch
) -> int:
    from hetero_megatron.launch.torchrun import TorchrunAgents, attach
    from hetero_megatron.plans import all_ranks

    agents = TorchrunAgents(records)

    def attached(config: RunConfig) -> Attached:
        ranks = all_ranks(config.plan)[-1] + 1
        return attach(launcher, agents, config.cluster, ranks, address)

    try:
        return launch(argv, attached)
    except UserError as error:
        agents.close(" ".join(str(error).split()))
        raise
    finally:
        agents.close()
