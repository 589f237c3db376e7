"""Where a teacher, a reference or a generator goes. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import DTYPE, OPTIMIZER, TOP_K, Plan
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.roles import format_placement, placement_json, placement_page
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.role_placement import RolePlacement, RoleSearch
from hetero_megatron.plans.forward_only import words_of
from hetero_megatron.plans.made_for import made_for
from hetero_megatron.plans.memory.of_plan import moments_of
from hetero_megatron.plans.roles import GENERATOR, OTHER_MODELS, ROLES
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.spec.preference import Preference
from hetero_megatron.utils.text import format_seconds


@dataclass(frozen=True)
class Placed:
    """The best placement of a second model that only runs forward.

    Attributes:
        plan: of the model that is trained, with ranks for the role where it has chips of its own.
        role_plan: where the role's numbers are computed once, under which ``hetero-megatron score`` writes them; else
            None.
        placement: all alternatives, the best first.
    """

    plan: Plan
    role_plan: Plan | None
    placement: RolePlacement = field(repr=False)

    @property
    def step_seconds(self) -> float:
        """Predicted, of one optimizer step with its part of what is computed once."""
        return self.placement.best.step_seconds

    @property
    def file(self) -> str:
        """The plan file."""
        best = self.placement.best
        head = f"{self.plan.model.name} beside a {self.placement.asked.name} ({best.way}): "
        return f"# {head}{best.step_seconds:.4g} s per step predicted. Written by hetero-megatron plan.\n" + (
            self.plan.text()
        )

    def explain(self) -> str:
        """Where the role is and why, each alternative, and the predicted step."""
        return format_placement(self.placement, self.plan.model.spec)

    def as_json(self) -> dict[str, Any]:
        """As JSON data."""
        role_plan = {} if self.role_plan is None else {"role_plan": self.role_plan.text()}
        alternatives = placement_json(self.placement)
        return {**alternatives, "step_seconds": self.step_seconds, "plan": self.plan.text(), **role_plan}

    def page(self) -> str:
        """The report as HTML."""
        return placement_page(self.placement, self.plan.model.spec)

    def __str__(self) -> str:
        return f"{self.placement.asked.name} on {self.placement.best.way}: {format_seconds(self.step_seconds)} per step"


def place_role(
    model: Model | str, cluster: Cluster, role: str, other: Model | str, *, seq_length: int, global_batch_size: int,
    preference: str | None = None, top_k: int = TOP_K, epochs: float = 1.0, dtype: str = DTYPE,
    optimizer: str = OPTIMIZER, grad_reduce_in_bf16: bool = False, micro_batch_size: int | None = None,
    recompute: str | None = None, context: str = "auto", offload: str = "auto", offload_activations: str = "auto",
    more_schedules: str = "auto", schedule_effort: float = SearchSpace.schedule_effort,
    memory_margin: float = CostOptions.margin, time_limit: float | None = None, seed: int = 0,
    progress: Callable[[str], None] | None = None, rollouts: Grpo | None = None,
) -> Placed:  # fmt: skip
    """The best placement of ``other`` in a role ("teacher", "reference") beside ``model``, which is trained; or of the
    "generator", which is ``model`` itself.

    Args:
        preference: the loss of pairs, of a reference; top_k: likeliest tokens of a position that a teacher sends.
        epochs: how often a run reads its data, which a file is computed once for.
        rollouts: of a generator, how answers are sampled.
        The others are those of :func:`hetero_megatron.plan`.

    Raises:
        UserError: another vocabulary, no placement fits, or what a search without roles refuses.
    """
    shapes = (model if isinstance(model, Model) else Model(model)).stretched(seq_length)
    second = other if isinstance(other, Model) else Model(other)
    if role not in ROLES or (role == GENERATOR) != (rollouts is not None):
        accepted = f"{', '.join(OTHER_MODELS)}, or {GENERATOR} with rollouts"
        raise UserError("no such role", field="role", value=role, accepted=accepted)
    if second.spec.vocab_size != shapes.spec.vocab_size:
        unlike = f"another vocabulary: {second.spec.vocab_size} tokens, {shapes.name} has {shapes.spec.vocab_size}"
        raise UserError(unlike, field=f"--{role}-hf", value=second.name, accepted="a model with the same tokenizer")
    loss = None if preference is None else Preference(preference, smoothing=1e-3 if preference == "exo_pair" else 0.0)
    space = SearchSpace(
        micro_batch_sizes=None if micro_batch_size is None else (micro_batch_size,), recompute=recompute,
        context=context, offload=offload, offload_activations=offload_activations, more_schedules=more_schedules,
        schedule_effort=schedule_effort,
    )  # fmt: skip
    costs = CostOptions(
        margin=memory_margin, moments=moments_of(optimizer), muon=optimizer == "muon",
        reference=0 if loss is None else loss.forwards, gradient_bytes=2.0 if grad_reduce_in_bf16 else None,
    )  # fmt: skip
    options = SearchOptions(dtype=dtype, time_limit=time_limit, space=space, costs=costs, seed=seed)
    problem = PlanningProblem(shapes.spec, cluster.described, seq_length, global_batch_size, options)
    problem.check()
    forwards, spec = 2 if loss is not None and loss.estimates_kl else 1, second.stretched(seq_length).spec
    words = words_of(role, min(top_k, spec.vocab_size - 1))
    asked = ForwardQuestion(role, spec, seq_length, global_batch_size, dtype, costs, words, forwards)
    if rollouts is not None:
        from hetero_megatron.planner.whatif.generator_placement import GeneratorSearch

        placement = GeneratorSearch(problem, asked, rollouts, progress).placed()
    else:
        placement = RoleSearch(problem, asked, epochs, progress).placed()
    best = placement.best
    assert best.plan is not None
    section = made_for(shapes.spec, dtype, optimizer, cluster.described, best.plan.ranks)
    chosen = Plan(replace(best.plan, made_for=section), shapes, dtype, optimizer, beside={role: second}, top_k=top_k)
    written = None if best.role_plan is None else Plan(best.role_plan, second, dtype)
    return Placed(chosen, written, placement)
