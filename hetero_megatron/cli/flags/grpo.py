"""Flags about sampled answers (--grpo) -> how they are sampled and learned from."""

from __future__ import annotations

from pathlib import Path

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.plans.roles import GENERATOR, role_plan
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.grpo import FLAG_KEYS, Grpo
from hetero_megatron.spec.moe import Balancing
from hetero_megatron.training.config import RoleConfig

# What is not known beside it: the flag's key, why.
_BESIDE = (
    ("preference", "pairs have their answers"),
    ("teacher_hf", "a teacher speaks of data that are there before the step"),
    ("teacher_scores", "a teacher speaks of data that are there before the step"),
    ("save_scores", "answers that are sampled have no scores"),
    ("elastic", "ranks that come later would have no answers"),
    ("eval_interval", "an evaluation would have no answers"),
    ("skip_train", "an evaluation would have no answers"),
    ("rampup_batch_size", "each step has the same number of prompts"),
    ("compile", "answers are sampled by layers as they are"),
    ("fp8_format", "answers are sampled in the run's dtype"),
    ("epochs", "a step has prompts, not samples"),
    ("no_packing", "each answer has a row of its own"),
    ("replan_on_drift", "the planner knows no sampling"),
    ("hidden_dropout", "the policy that samples has none"),
    ("attention_dropout", "the policy that samples has none"),
)  # fmt: skip


def build_grpo(
    args: Arguments, spec: ModelSpec, plan: Plan, balancing: Balancing
) -> tuple[Grpo, RoleConfig | None]:
    """How answers are sampled and learned from, and the generator, where the plan has ranks for it.

    Raises:
        UserError: names the flag.
    """
    for key, reason in _BESIDE:
        if args[key]:
            raise flag_error(key, args[key], f"not known beside --grpo: {reason}", "leave one of the two out")
    for key in ("sft_loss", "overlong_samples", "shuffle_buffer"):
        if key in args.given:
            raise flag_error(key, args[key], "has no effect beside --grpo: answers are sampled", "leave the flag out")
    if args["cuda_graph_impl"] == "local":
        raise flag_error("cuda_graph_impl", "local", "not known beside --grpo", "leave one of the two out")
    values = {name: args[key] for name, key in FLAG_KEYS.items()} | {"weighs_kl": not args["grpo_plain_kl"]}
    _check_function(args)
    try:
        grpo = Grpo(**values)
    except UserError as error:
        raise flag_error(FLAG_KEYS[error.field], error.value, error.problem, error.accepted) from None
    _check_model(args, spec, grpo)
    _check_plan(args, plan)
    _check_batch(args, plan, grpo)
    if spec.moe is not None:
        _check_experts(plan, balancing)
    return grpo, _generator(args, spec, plan)


def _generator(args: Arguments, spec: ModelSpec, plan: Plan) -> RoleConfig | None:
    if role_plan(plan, GENERATOR) is None:
        for key in ("generator_sync_every", "generator_ahead"):
            if key in args.given:
                problem = "has no effect where the ranks that train sample"
                raise flag_error(key, args[key], problem, "roles: {generator: ..} in the plan")
        return None
    if "rollout_batch_size" in args.given:
        problem = "has no effect beside a generator, whose pipelines sample micro_batch_size answers at once"
        raise flag_error("rollout_batch_size", args["rollout_batch_size"], problem, "leave the flag out")
    return RoleConfig(GENERATOR, "", spec)


def _check_function(args: Arguments) -> None:
    name = args["reward_function"]
    if name is None:
        raise flag_error("reward_function", None, "missing: nothing says which answers are good", "FILE.py:NAME")
    path, _, function = name.rpartition(":")
    if not path or not function.isidentifier():
        raise flag_error("reward_function", name, "names no function of a file", "FILE.py:NAME")
    if not Path(path).is_file():
        raise flag_error("reward_function", name, "there is no such file", "FILE.py:NAME")
    most = 60 * args["distributed_timeout_minutes"]
    if args["reward_timeout"] >= most:
        problem = f"other ranks wait {most:g} s for rewards (--distributed-timeout-minutes)"
        raise flag_error("reward_timeout", args["reward_timeout"], problem, f"less than {most:g}")


def _check_model(args: Arguments, spec: ModelSpec, grpo: Grpo) -> None:
    """Refuse models of which answers cannot be sampled, or whose reference is not there."""
    refused = (
        (spec.mtp_layers > 0, "modules that predict further tokens"),
        (any(rope.switch is not None for rope in spec.ropes), "short and long rotary factors (LongRoPE)"),
    )
    for is_there, what in refused:
        if is_there:
            raise flag_error("grpo", True, f"not known for {what}", "another model")
    if spec.lora is not None and spec.lora.dropout:
        problem = "not known beside --grpo: the policy that samples has none"
        raise flag_error("lora_dropout", spec.lora.dropout, problem, "0")
    if grpo.beta and spec.lora is None:
        problem = "the reference is the base with adapters off, and there are none"
        raise flag_error("grpo_kl_beta", grpo.beta, problem, "0, or --lora-rank")
    if grpo.beta and spec.lora is not None and spec.lora.residual is not None:
        problem = f"the base without adapters of {spec.lora.residual} is not the model that they began with"
        raise flag_error("grpo_kl_beta", grpo.beta, problem, "0, or a plain adapter")


def _check_experts(plan: Plan, balancing: Balancing) -> None:
    """Refuse what counts padding as tokens, and ranks that have not all experts where they sample."""
    if balancing != Balancing():
        problem = "not known beside what balances experts: rows of answers are filled up with tokens that are none"
        accepted = "no --moe-aux-loss-coeff, --moe-z-loss-coeff and --moe-router-bias-update-rate"
        raise flag_error("grpo", True, problem, accepted)
    if role_plan(plan, GENERATOR) is None and any(stage.experts for stage in plan.stages):
        problem = "ranks that sample have columns of all experts, and the plan divides these (experts:)"
        raise flag_error("grpo", True, problem, "a plan without experts:, or with roles: {generator: ..}")


def _check_plan(args: Arguments, plan: Plan) -> None:
    refused = (
        (plan.outer is not None, "outer steps"),
        (any(name != GENERATOR for name, _ in plan.roles), "roles of other models"),
        (any(stage.weights is not None for stage in plan.stages), "divided weights (weights:)"),
    )
    for is_there, what in refused:
        if is_there:
            raise flag_error("grpo", True, f"not known beside {what}", "a plan without them")


def _check_batch(args: Arguments, plan: Plan, grpo: Grpo) -> None:
    size, groups = plan.global_batch_size, args["grpo_prompts_per_step"]
    if size % grpo.group_size:
        problem = f"a step has {size} answers (--global-batch-size), no whole number of groups"
        raise flag_error("grpo_group_size", grpo.group_size, problem, f"a divisor of {size}")
    if groups is not None and groups * grpo.group_size != size:
        problem = f"a step has {size} answers (--global-batch-size) in groups of {grpo.group_size}"
        raise flag_error("grpo_prompts_per_step", groups, problem, f"{size // grpo.group_size}, or left out")
    if grpo.max_new_tokens >= plan.seq_length:
        problem = f"leaves no room for a prompt in --seq-length {plan.seq_length}"
        raise flag_error("max_new_tokens", grpo.max_new_tokens, problem, f"less than {plan.seq_length}")
    per_step = {"train_samples": size, "save_interval": 1, "train_iters": 1, "exit_interval": 1}
    for key, unit in per_step.items():
        if args[key] and args[key] // unit % grpo.iterations:
            problem = f"is in the middle of --grpo-iterations {grpo.iterations} on the same answers"
            raise flag_error(key, args[key], problem, f"a multiple of {unit * grpo.iterations}")
