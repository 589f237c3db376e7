"""``hetero-megatron run``: start the ranks of a plan on this host, and continue when some fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_megatron.cli.arguments import beyond, read_number, refuse_empty
from hetero_megatron.cli.run_elastic import ElasticLimits, join, run_elastic
from hetero_megatron.cli.run_plans import configured, drift_in_place, planner_for, replanned
from hetero_megatron.environment.launcher import refuse_copies, started_by_torchrun
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat, Setup, SupervisedJob, TestbedJob
from hetero_megatron.launch.supervise import DRIFT_FLAG, Supervisor, Watch
from hetero_megatron.monitoring.stragglers import diagnoses_at
from hetero_megatron.plans import all_ranks
from hetero_megatron.plans.outer import other_phase
from hetero_megatron.testbed.settings import CHIPS, LINKS
from hetero_megatron.training.config import RunConfig

if TYPE_CHECKING:
    from hetero_megatron.launch.attached import Attached
    from hetero_megatron.launch.job import Access

USAGE = """\
usage: hetero-megatron run --plan P [--cluster C] [--on-failure stop|restart|replan] [--fallback-plan F ...]
                           [--elastic] [--max-restarts N] [--max-replans N] [--grace SECONDS]
                           [--testbed] [--chips …] [--links …] [--via ssh …] -- FLAGS OF pretrain_gpt.py
       hetero-megatron run --join DIR [--node NAME] [--nproc-per-node N] [--cluster C]

  starts one process per rank on this host (each node of the cluster file is a label); ranks resume from --load
  --on-failure stop      end when a rank fails
               restart   all ranks again under the same plan (default)
               replan    drop the nodes of ranks that died by a signal or hung, and where nodes cannot reach each
                         other as few as will do; the first --fallback-plan that fits what is left goes on, or with
                         outer steps the islands that are left (else the planner searches one: needs --cluster);
                         ranks that only crashed are restarted
  --elastic              replan without ending a process: ranks that are left go on from what is in their memories
                         (a loss costs at most --peer-replicas-every K, 1, steps), and one that
                         gets SIGTERM hands over at the step's end and leaves; hosts may join (not a testbed); also
                         under torchrun, the same command on all hosts, and with --via ssh
  --join DIR             on another host, or here: join the elastic job whose --save directory is DIR, after a step
  --node NAME            this host in the cluster file (default: its own name); --cluster C: one with all nodes, where
                         the job's has not got this one; --nproc-per-node N: ranks here, in a job without cluster file
  --max-restarts N       give up after so many restarts (default 3)
  --least-speed SHARE    of what others of its kind compute, for a device that joins with --elastic (default 0.5)
  --wait-for-hosts S     with --elastic: seconds to wait for hosts that join once no rank is left (default 0); they go
                         on from the last checkpoint
  --grace SECONDS        how long the other ranks may take to end after one failed (default 30)
  --max-replans N        with --replan-on-drift FACTOR among the flags: how often to plan again because ranks drift
                         from their rates (default 2); then drift is not looked for any more
  --testbed              run on a testbed of --cluster, anew in every round (with --elastic there is one): nodes can
                         really be lost, chips be slowed; --chips and --links are those of hetero-megatron testbed run
  --via ssh              run on the hosts of --cluster, through ssh, one elastic agent each; the rendezvous store is
                         here, so any of them may be lost; --save must be a directory that all hosts share
  --ssh-command WORDS    in place of ssh and its options; it is given a host and a shell line
  --address ADDRESS      of this host, as the others reach it (default: from where the first one is reached); with
                         --elastic: hosts other than this one may join
  --connect-timeout S    seconds for all hosts to answer (default 30)
  --lease S              seconds without a word after which a host, or this launcher, counts as lost (default 30)
  --rejoin S             look for lost hosts every so many seconds, and go on with those that are back (default 60;
                         0: never)"""
_VIA_SSH = ("--ssh-command", "--address", "--connect-timeout", "--lease", "--rejoin")
_OF_ELASTIC = ("--least-speed", "--wait-for-hosts")
_SINGLE = (
    *("--plan", "--cluster", "--on-failure", "--max-restarts", "--max-replans", "--grace"),
    *_OF_ELASTIC,
    *("--chips", "--links"),
    *("--via", *_VIA_SSH),
)
_MOST = 1e9  # of numbers of seconds and restarts
_POLICIES = ("stop", "restart", "replan")
PRETRAIN = (sys.executable, "-m", "hetero_megatron", "pretrain")
TESTBED_RUN = (sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    refuse_copies("hetero-megatron run", "starts all ranks by itself")
    if started_by_torchrun():
        from hetero_megatron.cli.run_torchrun import check_worker

        check_worker(argv)
        return as_worker(argv)
    if any(word == "--join" or word.startswith("--join=") for word in argv):
        return join(argv, PRETRAIN)
    return launch(argv)


def as_worker(argv: Sequence[str]) -> int:
    """One of the processes that torchrun has started with this command."""
    from hetero_megatron.cli.run_torchrun import work

    return work(argv, parse, launch, PRETRAIN)


def launch(argv: Sequence[str], attach: Callable[[RunConfig], Attached] | None = None) -> int:
    """``attach``: gives the hosts that torchrun has started; None: this process starts all ranks."""
    options, fallbacks, words = parse(argv)
    if "--elastic" in words:
        raise UserError("belongs before --", field="--elastic", accepted="hetero-megatron run --elastic ... -- FLAGS")
    refuse_empty(argv[: argv.index("--")])
    elastic = _elastic(options)
    words += ["--elastic"] if elastic else []
    policy = options.get("--on-failure", "replan" if elastic else "restart")
    if policy not in _POLICIES:
        raise UserError("unknown value", field="--on-failure", value=policy, accepted=", ".join(_POLICIES))
    if "--plan" not in options:
        raise UserError("missing", field="--plan", accepted="a plan file")
    cluster = Path(options["--cluster"]) if "--cluster" in options else None
    testbed = _testbed(options, cluster)
    access = _access(options, cluster)
    config = configured(words, Path(options["--plan"]), cluster, None)
    if policy == "replan" and not fallbacks and cluster is None and config.plan.outer is None:
        raise UserError("missing", field="--fallback-plan", accepted="plan files, or --cluster to search one")
    attached = attach(config) if attach is not None else None
    if elastic and access is not None:
        from hetero_megatron.launch.ssh_agents import attach as attach_by_ssh

        assert config.cluster is not None and cluster is not None
        attached = attach_by_ssh(access, config.cluster, Path(options["--plan"]), cluster, words, PRETRAIN)
    seats = attached.seats if attached is not None else _seats(config)
    if config.plan.roles and policy == "replan" and not fallbacks:
        raise UserError("the planner finds no ranks for the roles of a plan", field="--on-failure", value=policy,
                        accepted="--fallback-plan FILE beside it, or restart")  # fmt: skip
    for plan in fallbacks:
        _same_work(configured(words, plan, None, None), config, plan)
    needs_checkpoints = ("--on-failure", policy) if policy != "stop" else (DRIFT_FLAG, config.failure.replan_on_drift)
    if needs_checkpoints[1] is not None and not elastic and not config.checkpoint.goes_on:
        raise UserError(
            "needs checkpoints to go on from", field=needs_checkpoints[0], value=needs_checkpoints[1],
            accepted="--save DIR and --load DIR, the same, without --finetune (to begin with other weights: "
            "--pretrained-checkpoint or --load-hf beside them); or --on-failure stop",
        )  # fmt: skip
    scratch = Path(config.checkpoint.save or ".")
    scratch.mkdir(parents=True, exist_ok=True)
    setup = Setup(Path(options["--plan"]), seats, cluster, PRETRAIN, _together(config, seats, fallbacks))
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    restarts, grace = _number(options, "--max-restarts", 3), _number(options, "--grace", 30)
    planner = planner_for(words, config, setup, fallbacks, scratch, elastic)
    replans = int(_number(options, "--max-replans", 2))
    if config.failure.replan_on_drift and not replans:
        raise UserError("contradicts --replan-on-drift", field="--max-replans", value=0, accepted="1 or more")
    if elastic:
        least_speed, wait = _number(options, "--least-speed", 0.5), _number(options, "--wait-for-hosts", 0)
        limits = ElasticLimits(int(restarts), grace, least_speed, wait)
        kinds = testbed[len(TESTBED_RUN) :] if testbed is not None else None
        return run_elastic(setup, words, planner, limits, scratch, log, options.get("--address"), config, kinds,
                           drift_in_place(words, scratch, replans) if config.failure.replan_on_drift else None,
                           attached)  # fmt: skip
    replanner = replanned(words, scratch) if config.failure.replan_on_drift else None
    def on_testbed(setup: Setup, words: Sequence[str], number: int) -> SupervisedJob:
        assert testbed is not None
        logs = scratch / f"testbed-round-{number}"
        return TestbedJob(setup, words, number, grace, testbed, logs, diagnoses_at(scratch, number))

    def on_hosts(setup: Setup, words: Sequence[str], number: int) -> SupervisedJob:
        from hetero_megatron.launch.job import HostsJob

        assert access is not None
        return HostsJob(setup, words, number, access, diagnoses_at(scratch, number), grace)

    launch = on_testbed if testbed is not None else on_hosts if access is not None else None
    watch = _watch(options, access) if policy == "replan" else None
    return Supervisor(
        setup, words, policy, planner, int(restarts), grace, scratch, log, replanner, replans, launch, watch
    ).run()


def _elastic(options: dict[str, str]) -> bool:
    """Whether the ranks stay when some are lost."""
    if "--elastic" not in options:
        for name in _OF_ELASTIC:
            if name in options:
                raise UserError("it needs --elastic", field=name, value=options[name])
        return False
    if "--rejoin" in options:
        accepted = "hetero-megatron run --join DIR on the host that is back"
        raise UserError("contradicts --elastic, which hosts join by themselves", field="--rejoin",
                        value=options["--rejoin"], accepted=accepted)  # fmt: skip
    if options.get("--on-failure", "replan") != "replan":
        raise UserError("contradicts --elastic, which plans again", field="--on-failure",
                        value=options["--on-failure"], accepted="replan, or without --elastic")  # fmt: skip
    return True


def _access(options: dict[str, str], cluster: Path | None) -> Access | None:
    """How the hosts are reached; None: everything runs on this one."""
    flags = [name for name in _VIA_SSH if name in options and not (name == "--address" and "--elastic" in options)]
    if "--via" not in options:
        if flags:
            raise UserError("it needs --via ssh", field=flags[0], value=options[flags[0]])
        return None
    if options["--via"] != "ssh":
        raise UserError("unknown value", field="--via", value=options["--via"],
                        accepted="ssh; for SLURM and Kubernetes: hetero-megatron launch")  # fmt: skip
    if cluster is None:
        raise UserError("needs the hosts", field="--via", value="ssh", accepted="--cluster FILE beside it")
    if "--testbed" in options:
        raise UserError("contradicts --via", field="--testbed", accepted="one of them")
    from hetero_megatron.launch.job import Access

    defaults = Access()
    return Access(
        options.get("--ssh-command", defaults.ssh), options.get("--address", ""),
        _number(options, "--connect-timeout", defaults.connect_seconds), _number(options, "--lease", defaults.lease),
    )  # fmt: skip


def _watch(options: dict[str, str], access: Access | None) -> Watch | None:
    """Looks for lost hosts that are back; None: they stay lost."""
    interval = _number(options, "--rejoin", 60)
    if access is None or not interval:
        return None
    from hetero_megatron.launch.job import Returned

    return Returned(access, interval)


def _testbed(options: dict[str, str], cluster: Path | None) -> list[str] | None:
    """``testbed run`` with its flags; None: no testbed."""
    flags = [word for name in ("--chips", "--links") if name in options for word in (name, options[name])]
    if "--testbed" not in options:
        if flags:
            raise UserError("it needs --testbed", field=flags[0], value=flags[1])
        return None
    if cluster is None:
        raise UserError("needs a cluster to emulate", field="--testbed", accepted="--cluster FILE beside it")
    if "--address" in options:
        raise UserError("contradicts --testbed, which no host can join", field="--address", value=options["--address"],
                        accepted="one of them")  # fmt: skip
    for flag, kinds in (("--chips", CHIPS), ("--links", LINKS)):
        if options.get(flag, kinds[0]) not in kinds:
            raise UserError("unknown choice", field=flag, value=options[flag], accepted=", ".join(kinds))
    return [*TESTBED_RUN, *flags]


def _seats(config: RunConfig) -> tuple[Seat, ...]:
    """All chips of the cluster, or as many one-chip nodes as the plan has ranks."""
    if config.cluster is not None:
        return tuple(Seat(r.node, r.local) for r in config.cluster.ranks)
    return tuple(Seat(f"rank{r}", 0, device=r) for r in range(all_ranks(config.plan)[-1] + 1))


def _together(config: RunConfig, seats: Sequence[Seat], fallbacks: Sequence[Path]) -> tuple[frozenset[str], ...]:
    """Nodes of an island: without a cluster file, whose chips may be idle, or another plan, the rest of one that lost a
    node has nothing to do."""
    outer = config.plan.outer
    if outer is None or config.cluster is not None or fallbacks:
        return ()
    return tuple(frozenset(seats[rank].node for rank in ranks) for ranks in outer.islands)


def _same_work(other: RunConfig, config: RunConfig, path: Path) -> None:
    """Check that a fallback plan computes the same."""
    for key in ("global_batch_size", "seq_length"):
        own_size, fallback_size = getattr(config.plan, key), getattr(other.plan, key)
        if own_size != fallback_size:
            raise UserError(
                f"its {key} is {fallback_size}, so the loss curve would change",
                field="--fallback-plan", value=str(path), accepted=f"a plan with {key} {own_size}",
            )  # fmt: skip
    if bool(other.plan.roles) != bool(config.plan.roles):  # of the teacher's distribution, its likeliest tokens or all
        raise UserError("one of the two plans has roles, so the loss curve would change", field="--fallback-plan",
                        value=str(path), accepted="roles in both, or in neither")  # fmt: skip
    own_outer, outer = config.plan.outer, other.plan.outer
    if own_outer is not None and outer is not None and (changes := other_phase(asdict(own_outer), outer)):
        raise UserError(f"its exchanges would be others than the plan's: {', '.join(changes)}", field="--fallback-plan",
                        value=str(path), accepted="outer steps of the same phase, or a plan without")  # fmt: skip


def _number(options: Mapping[str, str], name: str, default: float) -> float:
    text = options.get(name, str(default))
    try:
        value = read_number(float, text)
    except ValueError as error:
        raise UserError(str(error), field=name, value=text, accepted="0 or more") from None
    if (violation := beyond(value, 0, _MOST)) is not None:
        raise UserError(violation[0], field=name, value=text, accepted=violation[1])
    return value


def parse(argv: Sequence[str]) -> tuple[dict[str, str], list[Path], list[str]]:
    if "--" not in argv:
        raise UserError("missing", field="--", accepted="-- and then the flags of pretrain_gpt.py")
    split = list(argv).index("--")
    options: dict[str, str] = {}
    fallbacks: list[Path] = []
    words = list(argv[:split])
    while words:
        name, separator, value = words.pop(0).partition("=")
        if name in ("--testbed", "--elastic") and not separator:
            options[name] = ""
            continue
        if name not in (*_SINGLE, "--fallback-plan"):
            known_flags = (*_SINGLE, "--fallback-plan", "--testbed", "--elastic")
            raise UserError("unknown flag", field=name, accepted=", ".join(known_flags))
        values = [value] if separator else []
        while not separator and words and not words[0].startswith("--") and (not values or name == "--fallback-plan"):
            values.append(words.pop(0))
        if not values:
            raise UserError("has no value", field=name, accepted=USAGE.splitlines()[0])
        if name == "--fallback-plan":
            fallbacks += map(Path, values)
        else:
            options[name] = values[0]
    return options, fallbacks, list(argv[split + 1 :])
