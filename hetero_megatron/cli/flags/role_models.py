"""What flags say of a second model that only runs forward, a teacher or a reference, on ranks of its own or not; and of
the loss beside a teacher."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.cluster import Cluster
from hetero_megatron.data import DataConfig
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.plans.roles import GENERATOR, OTHER_MODELS, role_plan
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.distillation import Distillation
from hetero_megatron.spec.preference import WITHOUT_REFERENCE
from hetero_megatron.training.config import RoleConfig, ScoreConfig


def role_models(args: Arguments, spec: ModelSpec) -> dict[str, ModelSpec]:
    """By role, the models that flags name beside ``spec``, which is trained."""
    models = {name: role_spec(args, name) for name in OTHER_MODELS if args[f"{name}_hf"] is not None}
    return models | {GENERATOR: spec} if args["grpo"] else models


def role_spec(args: Arguments, name: str) -> ModelSpec:
    """What the model in the directory of a role is."""
    from hetero_megatron.checkpoint.model_files import model_directory

    key, flag = f"{name}_hf", f"--{name}-hf"
    args.values[key] = directory = model_directory(args[key], flag)
    return load_model(directory, flag)


def build_role(args: Arguments, name: str, spec: ModelSpec) -> RoleConfig:
    """The model of a role beside ``spec``, which is trained. UserError: it has another vocabulary."""
    model, key = role_spec(args, name), f"{name}_hf"
    if model.vocab_size != spec.vocab_size:
        trained = "the student's has" if name == "teacher" else "the model that is trained has"
        problem = f"another vocabulary: {model.vocab_size} tokens, {trained} {spec.vocab_size}"
        raise flag_error(key, args[key], problem, f"a {name} with the same tokenizer")
    return RoleConfig(name, args[key], model)


def own_ranks_fit(args: Arguments, role: RoleConfig, data: DataConfig | None) -> None:
    """UserError: the run is one that no role on ranks of its own, which reads samples for itself, can follow."""
    key = f"{role.name}_hf"
    if data is not None and data.reads_stream:
        problem = f"a {role.name} on its own ranks reads samples by their number, and a stream is read once, in order"
        raise flag_error(key, role.hf, problem, "stored data, or a plan without roles")
    if (drift := args["replan_on_drift"]) is not None:
        problem = f"the planner finds no ranks for a {role.name}"
        raise flag_error("replan_on_drift", drift, problem, "without it, or a plan without roles")


_FLAGS = {
    "loss": "distill_loss", "weight": "distill_weight", "temperature": "distill_temperature",
    "js_beta": "distill_js_beta",
}  # fmt: skip
# What knows nothing of it: whether it is there, its flag, why.
_BESIDE = (
    ("preference", "--preference compares whole answers"),
    ("elastic", "ranks that come later would have no teacher"),
)


def build_teacher(
    args: Arguments, spec: ModelSpec, plan: Plan, cluster: Cluster | None, data: DataConfig | None
) -> tuple[Distillation | None, RoleConfig | None]:
    """The loss beside a teacher, and the teacher on ranks of this run (None: its scores are in a file).

    Raises:
        UserError: names the flag.
    """
    key = "teacher_hf" if args["teacher_hf"] is not None else "teacher_scores"
    if args[key] is None:
        return None, None
    for other_key, reason in _BESIDE:
        if args[other_key]:
            raise flag_error(other_key, args[other_key], f"not known beside a teacher: {reason}", "one of the two")
    if spec.mtp_layers:
        problem = "not known beside a teacher: modules that predict further tokens learn from labels"
        raise flag_error("mtp_num_layers", spec.mtp_layers, problem, "0, or no teacher")
    if plan.outer is not None:
        raise flag_error(key, args[key], "there are no outer steps beside a teacher", "a plan without outer")
    distillation = Distillation(**{name: args[flag] for name, flag in _FLAGS.items()})
    own_ranks = role_plan(plan, "teacher") is not None
    if own_ranks and args["teacher_scores"] is not None:
        problem = "the plan has ranks for the teacher, whose scores are in a file"
        raise flag_error("teacher_scores", args["teacher_scores"], problem, "one of the two")
    if "score_top_k" in args.given and not own_ranks and args["save_scores"] is None:
        problem = "has no effect on a teacher without ranks of its own"
        raise flag_error("score_top_k", args["score_top_k"], problem, "roles: {teacher: ..} in the plan")
    if args["teacher_hf"] is None:
        return distillation, None
    teacher = build_role(args, "teacher", spec)
    if args["teacher_scores"] is not None:
        return distillation, None
    if own_ranks:
        return distillation, _on_own_ranks(args, teacher, data)
    return distillation, _beside(args, teacher, spec, plan, cluster)


def _on_own_ranks(args: Arguments, teacher: RoleConfig, data: DataConfig | None) -> RoleConfig:
    """The teacher, on ranks that the plan has for it, which read the student's samples for themselves."""
    own_ranks_fit(args, teacher, data)
    return replace(teacher, top_k=_top_k(args, teacher.spec))


def _top_k(args: Arguments, spec: ModelSpec) -> int:
    """Of each position's likeliest tokens; one outcome is left for all others."""
    k, most = int(args["score_top_k"]), spec.vocab_size - 1
    if "score_top_k" in args.given and k > most:
        raise flag_error("score_top_k", k, f"the vocabulary has {spec.vocab_size} tokens", f"1 to {most}")
    return min(k, most)


def _beside(
    args: Arguments, teacher: RoleConfig, spec: ModelSpec, plan: Plan, cluster: Cluster | None
) -> RoleConfig:
    """The teacher, which the plan's cuts fit."""
    from hetero_megatron.plans.forward_only import plan_beside

    try:
        plan_beside(plan, spec, teacher.spec, cluster)
    except UserError as error:
        problem = f"{error.problem} ({error.field})" if error.field else error.problem
        raise flag_error("teacher_hf", args["teacher_hf"], problem, error.accepted or "") from None
    return teacher


def build_scores(args: Arguments, spec: ModelSpec) -> ScoreConfig | None:
    """What ``hetero-megatron score`` writes; None: this is no such run."""
    path = args["save_scores"]
    if path is None:
        return None
    for key in ("save", "save_hf", "save_adapter", "teacher_hf", "teacher_scores", "lora_rank", "elastic"):
        if args[key]:
            raise flag_error(key, args[key], "hetero-megatron score trains nothing", "leave the flag out")
    for key in ("load", "pretrained_checkpoint", "load_adapter", "reference_hf", "reference_logps"):
        if args[key]:
            problem = "hetero-megatron score writes what the model in --load-hf says, and nothing else is read"
            raise flag_error(key, args[key], problem, "a directory for --load-hf (hetero-megatron convert)")
    for key in ("fp8_format", "compile"):
        if args[key]:
            problem = "hetero-megatron score computes in the run's dtype, layers as they are"
            raise flag_error(key, args[key], problem, "leave the flag out")
    if args["load_hf"] is None:
        raise flag_error("load_hf", None, "missing: the model whose scores are wanted", "--load-hf DIR")
    if args["preference"] in WITHOUT_REFERENCE:
        raise flag_error("preference", args["preference"], "the loss has no reference, so no scores", "dpo, or kto")
    return ScoreConfig(path, _top_k(args, spec), args["distill_temperature"])
