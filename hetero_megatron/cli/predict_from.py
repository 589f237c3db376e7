"""``predict --from FILE``: the plan that another runtime's configuration describes."""

from __future__ import annotations

import shlex
from argparse import Namespace

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import Plan
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.planned_model import fp8_of, with_lora
from hetero_megatron.cli.foreign_launch import launches_of
from hetero_megatron.cli.shell_script import OPEN, REFUSED, shown, unresolved
from hetero_megatron.errors import UserError
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.runtimes.accelerate import ACCELERATE
from hetero_megatron.plans.runtimes.deepspeed import DEEPSPEED
from hetero_megatron.plans.runtimes.runtime import ForeignRuntime, GivenSizes, nodes_of
from hetero_megatron.plans.runtimes.table import reordered
from hetero_megatron.plans.runtimes.torchtitan import TORCHTITAN
from hetero_megatron.plans.validate import validate
from hetero_megatron.spec import load_model
from hetero_megatron.utils.files import read_text

_SUFFIXES = {".toml": TORCHTITAN, ".json": DEEPSPEED}
_YAML = (".yaml", ".yml")
SIZES = ("seq_length", "micro_batch_size", "global_batch_size")


def read_plan(args: Namespace, cluster: Cluster) -> Plan:
    """The plan of ``args.source``, which runs on all ranks of the cluster unless it names the nodes.

    Raises:
        UserError: names the key or flag of the file that no plan can have, or a size that neither says.
    """
    name, text = args.source, read_text(args.source, "--from")
    runtime = _runtime(name, text)
    nodes = nodes_of(text) if args.nodes is None else tuple(args.nodes.split(","))
    world = _world(cluster, nodes, "--nodes" if args.nodes is not None else name)
    if runtime is None:
        return _from_flags(args, cluster, text, nodes, world)
    if args.model is None:
        accepted = "preset, Hugging Face directory or config.json"
        raise UserError("missing: the file names none", field="--model", accepted=accepted)
    model = Model.of(with_lora(args, load_model(args.model)), args.model)
    sizes = GivenSizes(world, model.spec.num_layers, **{size: getattr(args, size) for size in SIZES})
    assert runtime.read is not None
    loaded = runtime.read(text, name, sizes)
    if args.dtype is not None and loaded.dtype is not None and args.dtype != loaded.dtype:
        problem = f"the file says {loaded.dtype}"
        raise UserError(problem, field="--dtype", value=args.dtype, accepted=loaded.dtype, where=name)
    dtype = loaded.dtype or args.dtype or "bf16"
    plan = reordered(from_megatron(loaded.flags, model.spec), nodes, cluster.described)
    validate(plan, model.spec, cluster.described, dtype=dtype)
    return Plan(plan, model.stretched(plan.seq_length), dtype, args.optimizer or "adam", fp8_of(args), name)


def _runtime(name: str, text: str) -> ForeignRuntime | None:
    """By the file's suffix and first keys; None: flags of Megatron or FlagScale."""
    suffix = name[name.rfind("."):].lower() if "." in name else ""
    if suffix in _YAML and ("distributed_type:" in text or "fsdp_config:" in text):
        return ACCELERATE
    return _SUFFIXES.get(suffix)


def _world(cluster: Cluster, nodes: tuple[str, ...], name: str) -> int:
    """Ranks on the named nodes, or all."""
    ranks = cluster.described.ranks
    if not nodes:
        return len(ranks)
    known_nodes = {rank.node for rank in ranks}
    if missing := [node for i, node in enumerate(nodes) if node not in known_nodes or node in nodes[:i]]:
        raise UserError("no node of the cluster, or named twice", field="nodes", value=missing[0],
                        accepted=", ".join(sorted(known_nodes)), where=name)  # fmt: skip
    return sum(rank.node in nodes for rank in ranks)


def _from_flags(args: Namespace, cluster: Cluster, text: str, nodes: tuple[str, ...], world: int) -> Plan:
    """Of a launch line, or of flags alone: read as this program's own."""
    launches = launches_of(text, args.source, {})
    if len(launches) > 1:
        lines = ", ".join(str(launch.line) for launch in launches)
        raise UserError(f"several launch lines are in it ({lines})", field="--from", value=args.source, accepted="one")
    words = list(launches[0].flags) if launches else _words(text, args.source)
    if openly := [shown(word) for word in words if unresolved(word)]:
        raise UserError("known only when the script runs", field="--from", value=openly[0], where=args.source,
                        accepted="a file that says it")  # fmt: skip
    if refused := [one for launch in launches for one in launch.others if one.status in (REFUSED, OPEN)]:
        raise UserError(refused[0].reason, field=refused[0].flag, value=" ".join(refused[0].values),
                        accepted=refused[0].accepted, where=args.source)  # fmt: skip
    words += [part for size in SIZES if getattr(args, size) is not None
              for part in ("--" + size.replace("_", "-"), str(getattr(args, size)))]  # fmt: skip
    words += ["--model", args.model] if args.model is not None else []
    run = configure([*words, "--dry-run", "--world-size", str(world)], {})
    if args.dtype not in (None, run.dtype):
        raise UserError(f"the file says {run.dtype}", field="--dtype", value=args.dtype, accepted=run.dtype)
    plan = reordered(run.plan, nodes, cluster.described)
    validate(plan, run.spec, cluster.described, dtype=run.dtype)
    return Plan(plan, Model.of(run.spec, args.model or run.spec.name), run.dtype, args.optimizer or "adam",
                fp8_of(args), args.source)  # fmt: skip


def _words(text: str, name: str) -> list[str]:
    """Flags, one or several on a line; ``#`` begins a comment."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"are no words of a shell: {str(error).lower()}", field="--from", value=name) from None
    if not words or not words[0].startswith("--"):
        raise UserError("is no launch script, and no file of flags", field="--from", value=name,
                        accepted="a launch script of Megatron or FlagScale, flags, .toml of torchtitan, .json of"
                        " DeepSpeed, .yaml of Accelerate")  # fmt: skip
    return words
