"""What flags say of a second model that only runs forward: a teacher or a reference, on ranks of its own or not."""

from __future__ import annotations

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.data import DataConfig
from hetero_megatron.plans.roles import ROLES
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.training.config import RoleConfig


def role_models(args: Arguments) -> dict[str, ModelSpec]:
    """By role, the models that flags name."""
    return {name: role_spec(args, name) for name in ROLES if args[f"{name}_hf"] is not None}


def role_spec(args: Arguments, name: str) -> ModelSpec:
    """What the model in the directory of a role is."""
    from hetero_megatron.cli.hub import model_directory

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
