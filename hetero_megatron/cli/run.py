"""``hetero-megatron run``: start the ranks of a plan on this host, and go on when some fail."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.plan.dump import dump_yaml
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.supervise import Planner, Seat, Setup, Supervisor

USAGE = """\
usage: hetero-megatron run --plan P [--cluster C] [--on-failure stop|restart|replan] [--fallback-plan F ...]
                           [--max-restarts N] [--grace SECONDS] -- FLAGS OF pretrain_gpt.py

  starts one process per rank on this host (each node of the cluster file is a label); ranks resume from --load
  --on-failure stop      end when a rank fails
               restart   all ranks again under the same plan (default)
               replan    drop the nodes of ranks that died by a signal or hung; the first --fallback-plan that fits
                         what is left goes on (without any, the planner searches one: needs --cluster); ranks that
                         only crashed are restarted
  --max-restarts N       give up after so many restarts (default 3)
  --grace SECONDS        how long the other ranks may take to end after one failed (default 30)"""
_SINGLE = ("--plan", "--cluster", "--on-failure", "--max-restarts", "--grace")
_ENOUGH = 1 << 16  # ranks: how many there are is not asked yet
_POLICIES = ("stop", "restart", "replan")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    options, fallbacks, words = _parse(argv)
    policy = options.get("--on-failure", "restart")
    if policy not in _POLICIES:
        raise UserError("unknown value", field="--on-failure", value=policy, accepted=", ".join(_POLICIES))
    if policy == "replan" and not fallbacks and "--cluster" not in options:
        raise UserError("missing", field="--fallback-plan", accepted="plan files, or --cluster to search one")
    if "--plan" not in options:
        raise UserError("missing", field="--plan", accepted="a plan file")
    cluster = Path(options["--cluster"]) if "--cluster" in options else None
    config = _configure(words, Path(options["--plan"]), cluster, None)
    seats = _seats(config)
    for plan in fallbacks:
        _same_work(_configure(words, plan, None, None), config, plan)
    if policy != "stop" and (config.checkpoint.load is None or config.checkpoint.save is None):
        raise UserError(
            "needs checkpoints to go on from", field="--on-failure", value=policy, accepted="--save and --load"
        )
    scratch = Path(config.checkpoint.save or ".")
    scratch.mkdir(parents=True, exist_ok=True)
    setup = Setup(Path(options["--plan"]), seats, cluster)
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    restarts, grace = _number(options, "--max-restarts", 3), _number(options, "--grace", 30)
    planner = first_that_fits(words, fallbacks) if fallbacks else searched(words, config, scratch)
    return Supervisor(setup, words, policy, planner, int(restarts), grace, scratch, log).run()


def first_that_fits(words: Sequence[str], plans: Sequence[Path]) -> Planner:
    """The first plan whose ranks and chips are there."""

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        for plan in plans:
            try:
                if max(_configure(words, plan, cluster, len(seats)).plan.ranks) < len(seats):
                    return plan
            except UserError as error:
                print(f"launcher: {plan} does not fit: {error}", file=sys.stderr, flush=True)
        return None

    return choose


def searched(words: Sequence[str], config: RunConfig, scratch: Path) -> Planner:
    """The planner's best plan for what is left, with the same batch and sequence length."""

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        from hetero_megatron.cli.configure import configure

        same = ["--seq-length", str(config.plan.seq_length), "--global-batch-size", str(config.plan.global_batch_size)]
        flags = ["--auto-plan", "--cluster", str(cluster), *same, *words]
        try:
            plan = configure(flags, {"WORLD_SIZE": str(len(seats))}).plan
        except UserError as error:
            print(f"launcher: no plan found: {error}", file=sys.stderr, flush=True)
            return None
        path = scratch / f"plan-for-{len(seats)}-ranks.yaml"
        path.write_text(dump_yaml(plan))
        return path

    return choose


def _configure(words: Sequence[str], plan: Path, cluster: Path | None, world: int | None) -> RunConfig:
    from hetero_megatron.cli.configure import configure

    more = ["--cluster", str(cluster)] if cluster is not None else []
    environment = {"WORLD_SIZE": str(_ENOUGH if world is None else world)}
    return configure(["--plan", str(plan), *more, *words], environment)


def _seats(config: RunConfig) -> tuple[Seat, ...]:
    """All chips of the cluster, or as many one-chip nodes as the plan has ranks."""
    if config.cluster is not None:
        return tuple(Seat(r.node, r.local) for r in config.cluster.ranks)
    return tuple(Seat(f"rank{r}", 0) for r in range(max(config.plan.ranks) + 1))


def _same_work(other: RunConfig, config: RunConfig, path: Path) -> None:
    """A fallback plan must not change what is computed."""
    for what in ("global_batch_size", "seq_length"):
        mine, theirs = getattr(config.plan, what), getattr(other.plan, what)
        if mine != theirs:
            raise UserError(
                f"its {what} is {theirs}, so the loss curve would change",
                field="--fallback-plan", value=str(path), accepted=f"a plan with {what} {mine}",
            )  # fmt: skip


def _number(options: Mapping[str, str], name: str, default: float) -> float:
    text = options.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError("is not a number", field=name, value=text, accepted="0 or more")
    return value


def _parse(argv: Sequence[str]) -> tuple[dict[str, str], list[Path], list[str]]:
    if "--" not in argv:
        raise UserError("missing", field="--", accepted="-- and then the flags of pretrain_gpt.py")
    split = list(argv).index("--")
    options: dict[str, str] = {}
    fallbacks: list[Path] = []
    words = list(argv[:split])
    while words:
        name, separator, value = words.pop(0).partition("=")
        if name not in (*_SINGLE, "--fallback-plan"):
            raise UserError("unknown flag", field=name, accepted=", ".join((*_SINGLE, "--fallback-plan")))
        found = [value] if separator else []
        while not separator and words and not words[0].startswith("--") and (not found or name == "--fallback-plan"):
            found.append(words.pop(0))
        if not found:
            raise UserError("has no value", field=name, accepted=USAGE.splitlines()[0])
        if name == "--fallback-plan":
            fallbacks += map(Path, found)
        else:
            options[name] = found[0]
    return options, fallbacks, list(argv[split + 1 :])
