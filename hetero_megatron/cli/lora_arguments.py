"""--lora-rank and --lora-targets of commands that plan and predict."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hetero_megatron.errors import UserError
from hetero_megatron.spec import Lora, ModelSpec, adapted
from hetero_megatron.spec.lora import EVERY_TARGET, all_linear


def add_lora(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lora-rank", type=int, metavar="N", help="adapters of this rank are trained beside a frozen base")
    help = "projections with one (all linear layers)"
    add("--lora-targets", nargs="+", choices=EVERY_TARGET, metavar="NAME", help=help)


def with_lora(args: Namespace, model: ModelSpec) -> ModelSpec:
    """The model with the adapters that the arguments ask for."""
    if args.lora_rank is None:
        if args.lora_targets:
            raise UserError("has no effect without --lora-rank", field="--lora-targets", value=args.lora_targets)
        return model
    try:
        lora = Lora(args.lora_rank, float(args.lora_rank), tuple(args.lora_targets or all_linear(model.gated)))
        return adapted(model, lora)
    except UserError as error:
        name = "--lora-targets" if error.field == "targets" else "--lora-rank"
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted) from None
