"""Flags about the model of commands that plan and predict: adapters, modules that predict further tokens, fp8, and a
second model that only runs forward."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from dataclasses import replace

from hetero_megatron.api.inputs import Model
from hetero_megatron.api.plans import TOP_K
from hetero_megatron.cli.arguments import SHARE, count
from hetero_megatron.cli.flags.adapter import FLAG_KEYS, PLACES
from hetero_megatron.errors import UserError
from hetero_megatron.plans.fp8 import FORMATS, RECIPES, Fp8
from hetero_megatron.plans.made_for import MadeFor, as_flags
from hetero_megatron.plans.roles import OTHER_MODELS
from hetero_megatron.spec import Lora, ModelSpec, adapted, load_model, preset_names
from hetero_megatron.spec.adapter_modules import default_targets
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.spec.lora import BASE_DTYPES, MAX_RANK, SITE_WORD
from hetero_megatron.spec.preference import LOSSES, WITHOUT_REFERENCE, Preference


def flag_of(key: str) -> str:
    """Of ``plan``, by the key of its argument."""
    return "--for" if key == "runtime" else "--" + key.replace("_", "-")


def add_lora(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--lora-rank", type=count(1, MAX_RANK), metavar="N",
        help="adapters of this rank are trained beside a frozen base")  # fmt: skip
    help = "projections with one, or a regular expression over names of modules (all linear layers)"
    add("--lora-targets", nargs="+", metavar="NAME", help=help)
    add("--lora-layers", nargs="+", metavar="N-N", help="layers with adapters, such as 0-3 7 (all)")
    add("--lora-sites", nargs="+", metavar="SITE", help=f"all adapters, where they differ: {SITE_WORD}")
    add("--lora-dropout", type=SHARE, metavar="RATE", help="with which they drop elements of their inputs (0)")
    add("--use-dora", action="store_true", help="their rows are scaled to trained lengths (DoRA)")
    help = "of the frozen projections (the run's dtype)"
    add("--lora-base-dtype", choices=BASE_DTYPES, help=help)
    add("--mtp-num-layers", type=count(0, 64), metavar="N", help="modules that predict further tokens (0)")


def with_lora(args: Namespace, model: ModelSpec, made_for: MadeFor | None = None) -> ModelSpec:
    """The model with the adapters, or modules that predict further tokens, that the arguments ask for; what they leave
    open is as the plan's ``made_for`` has it."""
    if args.mtp_num_layers is None and made_for is not None:
        args.mtp_num_layers = made_for.mtp_layers
    if args.mtp_num_layers:
        if args.fp8_format is not None:
            raise UserError(
                "not known beside --fp8-format: a last stage may have nothing in fp8", field="--mtp-num-layers",
                value=args.mtp_num_layers, accepted="0, or no --fp8-format",
            )  # fmt: skip
        try:
            model = replace(model, mtp_layers=args.mtp_num_layers)
        except UserError as error:
            raise UserError(
                error.problem, field="--mtp-num-layers", value=args.mtp_num_layers, accepted=error.accepted
            ) from None
    if made_for is not None and made_for.lora is not None:
        for key, value in as_flags(made_for.lora, [key for key in PLACES if getattr(args, key)]).items():
            if getattr(args, key) is None or getattr(args, key) is False:
                setattr(args, key, value)
    if args.lora_rank is None:
        for flag, setting in (
            ("--lora-targets", args.lora_targets), ("--lora-layers", args.lora_layers),
            ("--lora-sites", args.lora_sites), ("--lora-dropout", args.lora_dropout),
            ("--lora-base-dtype", args.lora_base_dtype), ("--use-dora", args.use_dora or None),
        ):  # fmt: skip
            if setting is not None:
                value = None if setting is True else setting
                raise UserError("has no effect without --lora-rank", field=flag, value=value)
        return model
    if args.lora_base_dtype is not None and args.fp8_format is not None:
        raise UserError(
            "--fp8-format knows no weights in so few bits", field="--lora-base-dtype", value=args.lora_base_dtype,
            accepted="the command without --fp8-format",
        )  # fmt: skip
    from hetero_megatron.spec.adapter_places import chosen

    try:
        kind = {"dropout": args.lora_dropout or 0.0, "base_dtype": args.lora_base_dtype, "dora": args.use_dora}
        lora = Lora(args.lora_rank, float(args.lora_rank), default_targets(model), **kind)
        return adapted(model, chosen(model, lora, args.lora_targets, args.lora_layers, args.lora_sites))
    except UserError as error:
        flag_of_field = {"dropout": "--lora-dropout", "base_dtype": "--lora-base-dtype"}
        flag_of_field |= {name: f"--{FLAG_KEYS[name].replace('_', '-')}" for name in ("targets", "layers", "sites")}
        name = flag_of_field.get(error.field, "--lora-rank")
        name = "--use-dora" if error.field == "dora" else name
        raise UserError(error.problem, field=name, value=error.value, accepted=error.accepted) from None


def add_beside(parser: ArgumentParser) -> None:
    """Flags about a second model, as runs have them."""
    add = parser.add_argument
    add("--preference", choices=tuple(LOSSES), metavar="LOSS", help="of a run on preference pairs")
    add("--teacher-hf", metavar="DIR", help="a teacher (or preset), on its own or the same ranks")
    add("--reference-hf", metavar="DIR", help="a reference of pairs, on its own ranks")
    help = "likeliest tokens that a teacher sends (%(default)s)"
    add("--score-top-k", type=count(1, 2**20), default=TOP_K, metavar="N", help=help)


def add_rollouts(parser: ArgumentParser, all_shown: bool = True) -> None:
    """Flags about sampled answers, as runs have them; ``all_shown``: in --help, else --grpo alone."""
    add = parser.add_argument
    text = "perhaps by a generator" if all_shown else "--grpo --help says more"
    add("--grpo", action="store_true", help=f"answers are sampled; {text}")
    for flag, setting, text in (
        ("--max-new-tokens", {"type": count(1, 2**20), "metavar": "N"}, f"of each ({Grpo.max_new_tokens})"),
        ("--rollout-batch-size", {"type": count(1, 2**20), "metavar": "N"},
         f"that a pipeline which trains samples ({Grpo.rows})"),
        ("--grpo-iterations", {"type": count(1, 2**16), "metavar": "N"}, "steps on the same answers (1)"),
        ("--generator-sync-every", {"type": count(1, 2**30), "metavar": "K"}, "steps between weights for it (1)"),
        ("--generator-ahead", {"action": "store_true"}, "it samples the next answers during a step"),
    ):  # fmt: skip
        add(flag, help=text if all_shown else SUPPRESS, **setting)


def rollouts_of(args: Namespace) -> Grpo | None:
    """How answers are sampled; None: they are not. UserError: a flag about them without --grpo."""
    fields = {"max_new_tokens": "max_new_tokens", "rollout_batch_size": "rows", "grpo_iterations": "iterations",
              "generator_sync_every": "sync_every", "generator_ahead": "ahead"}  # fmt: skip
    given = {key: getattr(args, key) for key in fields if getattr(args, key)}
    if not args.grpo:
        for key, value in given.items():
            flag = f"--{key.replace('_', '-')}"
            shown = {} if value is True else {"value": value}
            raise UserError("has no effect without --grpo", field=flag, accepted="--grpo, or leave it out", **shown)
        return None
    return Grpo(**{fields[key]: value for key, value in given.items()})


def room_for_prompts(args: Namespace, seq_length: int) -> None:
    """UserError: answers leave none in a sequence."""
    new_tokens = args.max_new_tokens or Grpo.max_new_tokens
    if new_tokens >= seq_length:
        problem = f"leaves no room for a prompt in sequences of {seq_length} tokens"
        raise UserError(problem, field="--max-new-tokens", value=new_tokens, accepted=f"at most {seq_length - 1}")


def models_beside(args: Namespace) -> dict[str, Model]:
    """By role, the models that the arguments name."""
    given = {name: getattr(args, f"{name}_hf") for name in OTHER_MODELS}
    models = {}
    for name, directory in given.items():
        if directory is not None:
            flag = "--model" if directory in preset_names() else f"--{name}-hf"  # what is only planned has no weights
            models[name] = Model.of(load_model(directory, flag), directory)
    if len(models) > 1:
        problem = "not known beside a teacher: it is that of pairs, which have none"
        raise UserError(problem, field="--reference-hf", value=args.reference_hf, accepted="one of the two")
    if args.reference_hf is not None and args.score_top_k != TOP_K:
        problem, accepted = "has no effect without a teacher", "--teacher-hf DIR, or leave it out"
        raise UserError(problem, field="--score-top-k", value=args.score_top_k, accepted=accepted)
    return models


def preference_of(args: Namespace, adapters: bool) -> Preference | None:
    """The loss of pairs or labelled answers. UserError: there is none for the second model that is named, or one beside
    a teacher."""
    loss = args.preference
    if loss is not None and args.teacher_hf is not None:
        problem = "not known beside a teacher: it compares whole answers"
        raise UserError(problem, field="--preference", value=loss, accepted="one of the two")
    if args.reference_hf is not None and args.teacher_hf is None and (loss is None or loss in WITHOUT_REFERENCE):
        problem = "has no effect without --preference" if loss is None else f"the loss {loss} has no reference"
        raise UserError(problem, field="--reference-hf", value=args.reference_hf, accepted="--preference dpo, or kto")
    if loss is None:
        return None
    smoothing = 1e-3 if loss == "exo_pair" else 0.0
    return Preference(loss, smoothing=smoothing, in_step=adapters and args.reference_hf is None)


def add_fp8(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fp8-format", choices=FORMATS, help="linear modules compute in fp8 where chips have it")
    add("--fp8-recipe", choices=RECIPES, help="scales: one per weight and sequence, or 128 elements")


def fp8_of(args: Namespace) -> Fp8 | None:
    """What the arguments ask for. UserError: one without the other."""
    format_and_recipe = (args.fp8_format, args.fp8_recipe)
    if None in format_and_recipe and any(format_and_recipe):
        missing, present = ("recipe", "format") if args.fp8_format else ("format", "recipe")
        accepted = ", ".join(RECIPES if missing == "recipe" else FORMATS)
        raise UserError(f"missing beside --fp8-{present}", field=f"--fp8-{missing}", accepted=accepted)
    return Fp8(*format_and_recipe) if args.fp8_format else None
