"""--fp8-format and --fp8-recipe of commands that plan and predict."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hetero_megatron.errors import UserError
from hetero_megatron.plans.fp8 import FORMATS, RECIPES, Fp8


def add_fp8(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fp8-format", choices=FORMATS, help="linear modules of layers compute in fp8 where chips have it")
    add("--fp8-recipe", choices=RECIPES, help="scales in fp8: one per weight and sequence, or one per 128 elements")


def fp8_of(args: Namespace) -> Fp8 | None:
    """What the arguments ask for. UserError: one without the other."""
    format_and_recipe = (args.fp8_format, args.fp8_recipe)
    if None in format_and_recipe and any(format_and_recipe):
        missing, present = ("recipe", "format") if args.fp8_format else ("format", "recipe")
        accepted = ", ".join(RECIPES if missing == "recipe" else FORMATS)
        raise UserError(f"missing beside --fp8-{present}", field=f"--fp8-{missing}", accepted=accepted)
    return Fp8(*format_and_recipe) if args.fp8_format else None
