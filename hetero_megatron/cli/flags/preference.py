"""Flags about preference pairs -> the loss of a pair."""

from __future__ import annotations

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.cli.flags.role_models import build_role, own_ranks_fit
from hetero_megatron.data import DataConfig
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.plans.roles import role_plan
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.moe import Balancing
from hetero_megatron.spec.preference import Preference
from hetero_megatron.training.config import RoleConfig

_FLAGS = {
    "loss": "preference", "beta": "dpo_beta", "smoothing": "dpo_label_smoothing", "sft_weight": "dpo_sft_weight",
    "gamma": "simpo_gamma", "desirable": "kto_desirable_weight", "undesirable": "kto_undesirable_weight",
    "per_token": "dpo_average_log_probs",
}  # fmt: skip


def build_preference(args: Arguments, spec: ModelSpec, balancing: Balancing) -> Preference:
    """The loss of pairs, or of labelled answers.

    Raises:
        UserError: names the flag.
    """
    values = {name: args[key] for name, key in _FLAGS.items()}
    adapters, file = spec.lora is not None, args["reference_logps"]
    in_step = adapters and file is None and args["reference_hf"] is None
    try:
        preference = Preference(**values, in_step=in_step)
    except UserError as error:
        raise flag_error(_FLAGS[error.field], error.value, error.problem, error.accepted) from None
    if balancing.sequence_loss or balancing.z_loss:
        raise flag_error(
            "preference", preference.loss, "losses that balance experts are means over tokens, not over pairs",
            "no --moe-aux-loss-coeff and no --moe-z-loss-coeff",
        )  # fmt: skip
    if preference.refers:
        _check_reference(args, spec, preference)
    for key in ("reference_logps", "reference_hf"):
        if args[key] is not None and not preference.refers:
            raise flag_error(key, args[key], f"the loss {preference.loss} has no reference", "leave the flag out")
    return preference


def build_reference(
    args: Arguments, spec: ModelSpec, plan: Plan, preference: Preference, data: DataConfig | None
) -> RoleConfig | None:
    """The reference on ranks that the plan has for it; None: it has none.

    Raises:
        UserError: names the flag.
    """
    if role_plan(plan, "reference") is None:
        return None
    if (path := args["reference_logps"]) is not None:
        problem = "the plan has ranks for the reference, whose log-probabilities are in a file"
        raise flag_error("reference_logps", path, problem, "one of the two")
    role = build_role(args, "reference", spec)
    own_ranks_fit(args, role, data)
    return role


def _check_reference(args: Arguments, spec: ModelSpec, preference: Preference) -> None:
    """The reference is what the run begins with: the base, or all of the weights, of --load-hf."""
    reference_hf = args["reference_hf"]
    if spec.lora is not None and spec.lora.residual is not None:
        problem = f"the base without adapters of {spec.lora.residual} is not the model that they began with"
        accepted = "a plain adapter, or a loss without a reference (orpo)"
        raise flag_error("preference", preference.loss, problem, accepted)
    if preference.in_step:
        if args["compile"]:
            problem = "compiled layers have their adapters in them, and the reference is the base without"
            raise flag_error("compile", True, problem, "leave the flag out, or --reference-logps FILE")
        return
    if reference_hf is not None:
        from hetero_megatron.checkpoint.model_files import model_directory

        args.values["reference_hf"] = model_directory(reference_hf, "--reference-hf")
    elif args["load_hf"] is None and not args["dry_run"]:
        raise flag_error(
            "load_hf", None, "missing: the reference is the model that training begins with",
            "--load-hf DIR, --reference-hf DIR, or a loss without a reference (orpo, simpo, cpo)",
        )  # fmt: skip
    for key in ("finetune", "pretrained_checkpoint"):
        if args[key] and reference_hf is None:
            raise flag_error(key, args[key], "the reference is the model of --load-hf, and training begins with it",
                             "--load-hf (hetero-megatron convert makes a directory of a checkpoint)")  # fmt: skip
    if args["elastic"]:
        raise flag_error("elastic", True, "ranks that come later cannot compute the reference again",
                         "leave the flag out, or adapters (--lora-rank)")  # fmt: skip
