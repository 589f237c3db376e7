"""Flags about a teacher -> the loss beside it, and the teacher."""

from __future__ import annotations

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.distillation import Distillation
from hetero_megatron.spec.preference import WITHOUT_REFERENCE
from hetero_megatron.training.config import ScoreConfig, TeacherConfig

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
    args: Arguments, spec: ModelSpec, plan: Plan, cluster: Cluster | None
) -> tuple[Distillation | None, TeacherConfig | None]:
    """The loss beside a teacher, and the teacher on the same ranks (None: its scores are in a file).

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
    if args["teacher_hf"] is None:
        return distillation, None
    teacher = _teacher(args, spec)
    return distillation, _beside(args, teacher, spec, plan, cluster) if args["teacher_scores"] is None else None


def _teacher(args: Arguments, spec: ModelSpec) -> TeacherConfig:
    from hetero_megatron.cli.hub import model_directory

    args.values["teacher_hf"] = directory = model_directory(args["teacher_hf"], "--teacher-hf")
    teacher = load_model(directory, "--teacher-hf")
    if teacher.vocab_size != spec.vocab_size:
        problem = f"another vocabulary: {teacher.vocab_size} tokens, the student's has {spec.vocab_size}"
        raise flag_error("teacher_hf", directory, problem, "a teacher with the student's tokenizer")
    return TeacherConfig(directory, teacher)


def _beside(
    args: Arguments, teacher: TeacherConfig, spec: ModelSpec, plan: Plan, cluster: Cluster | None
) -> TeacherConfig:
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
    k = min(args["score_top_k"], spec.vocab_size - 1)
    return ScoreConfig(path, k, args["distill_temperature"])
