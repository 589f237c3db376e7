"""--fp8-format and --fp8-recipe of commands that plan and predict."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hetero_megatron.errors import UserError
from hetero_megatron.plans.fp8 import FORMATS, RECIPES, Fp8
from hetero_megatron.plans.made_for import MadeFor


def add_fp8(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fp8-format", choices=FORMATS, help="linear modules of layers compute in fp8 where chips have it")
    add("--fp8-recipe", choices=RECIPES, help="scales in fp8: one per weight and sequence, or one per 128 elements")


def fp8_of(args: Namespace, made: MadeFor | None = None, source: str = "") -> Fp8 | None:
    """What the arguments ask for, else what the plan file ``source`` was made for.

    Raises:
        UserError: one without the other, or something else than the plan was made for.
    """
    given = (args.fp8_format, args.fp8_recipe)
    if None in given and any(given):
        missing, there = ("recipe", "format") if args.fp8_format else ("format", "recipe")
        accepted = ", ".join(RECIPES if missing == "recipe" else FORMATS)
        raise UserError(f"missing beside --fp8-{there}", field=f"--fp8-{missing}", accepted=accepted)
    asked = Fp8(*given) if args.fp8_format else None
    if made is None or made.fp8 is None:
        return asked
    if asked is not None:
        made.agree_on_fp8(asked, source)
    return made.fp8
