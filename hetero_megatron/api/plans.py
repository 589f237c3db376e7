"""Plans as a program reads, writes, compares and predicts them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_megatron.api.inputs import Cluster, Model, positions_notice
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan as CanonicalPlan
from hetero_megatron.plans import dump_yaml, format_plan, load_plan
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.dump import format_roles
from hetero_megatron.plans.forward_only import ForwardRole, role_of
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.islands import add_islands, format_added, format_islands
from hetero_megatron.plans.made_for import MadeFor, read_made_for
from hetero_megatron.plans.memory.forward_only import with_role
from hetero_megatron.plans.memory.of_plan import MemoryBytes as Memory
from hetero_megatron.plans.memory.of_plan import estimate_memory, moments_of, with_communicators
from hetero_megatron.plans.memory.replicas import PeerCopies, copies_of, host_room
from hetero_megatron.plans.program import format_step
from hetero_megatron.plans.roles import GENERATOR, role_plan
from hetero_megatron.plans.routing import EVEN, routing_of
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.report.prediction import Question, as_json, format_prediction, format_question, question
from hetero_megatron.predictor.report.prediction_page import html_page
from hetero_megatron.predictor.report.timeline import format_timeline, perfetto_trace
from hetero_megatron.predictor.simulate import step
from hetero_megatron.predictor.simulate.beside import predict_beside
from hetero_megatron.predictor.simulate.peer_copies import CopyPrediction, predict_copies
from hetero_megatron.predictor.simulate.rollouts import predict_rollouts
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.spec import adapted, load_model
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.utils.outputs import write_text
from hetero_megatron.utils.text import format_seconds
from hetero_megatron.utils.yaml_document import Entry, read_document

DTYPE, OPTIMIZER = "bf16", "adam"  # of plans that do not say what they were made for
TOP_K = 64  # likeliest tokens of a position that a teacher on its own ranks sends, where nothing is said


@dataclass(frozen=True)
class Comparison:
    """Two plans on one cluster, the first beside the second.

    Attributes:
        seconds: predicted, of a step of each.
        memory: bytes of the fullest rank of each.
        tokens_per_second: of each.
    """

    seconds: tuple[float, float]
    memory: tuple[int, int]
    tokens_per_second: tuple[float, float]

    @property
    def speedup(self) -> float:
        """How many times as many tokens per second the first one does."""
        return self.tokens_per_second[0] / self.tokens_per_second[1]

    def __str__(self) -> str:
        seconds, other_seconds = map(format_seconds, self.seconds)
        own_memory, other_memory = (f"{size / 2**30:.1f} GiB" for size in self.memory)
        times = f"{seconds} per step against {other_seconds}: {self.speedup:.2f}x the tokens per second"
        return f"{times}; at most {own_memory} against {other_memory} on a rank"


@dataclass(frozen=True)
class Plan:
    """Which ranks hold which layers, heads, tokens and sequences, and in which order they compute.

    Attributes:
        model: its adapters are those that the plan was made for.
        dtype, optimizer, fp8: what it was made for.
        ranks: all that it uses.
        notices: what reading it added, in words.
        beside: by role, a model that only runs forward: on the plan's ranks for it, else on those of the model that is
            trained (``generator``: this one itself, of which answers are sampled); top_k: likeliest tokens of a
            position that a teacher on its own ranks sends.
    """

    canonical: CanonicalPlan
    model: Model
    dtype: str = DTYPE
    optimizer: str = OPTIMIZER
    fp8: Fp8 | None = None
    source: str = ""
    notices: tuple[str, ...] = ()
    beside: Mapping[str, Model] = field(default_factory=dict)
    top_k: int = TOP_K

    @staticmethod
    def read(
        path: str | os.PathLike[str] | Entry, cluster: Cluster | None = None, model: Model | str | None = None,
        *, dtype: str | None = None, optimizer: str | None = None, fp8: Fp8 | None = None,
        beside: Mapping[str, Model | str] | None = None, top_k: int = TOP_K,
    ) -> Plan:  # fmt: skip
        """A plan file.

        Args:
            cluster: it is also checked against this one.
            model, dtype, optimizer, fp8: None: what the plan was made for.
            beside, top_k: as the attributes; a plan with a role needs its model.

        Raises:
            UserError: names the key, the value, what would be accepted, file and line; or the plan was made for
                something else than what is given here.
        """
        document = path if isinstance(path, Entry) else read_document(path)
        source, section = document.file, document.section("made_for")
        made_for = read_made_for(section) if section is not None else None
        shapes = _model_of(made_for, model)
        if made_for is not None:
            made_for.agree_on_model(shapes.spec, source)
            for key, value in (("dtype", dtype), ("optimizer", optimizer)):
                if value is not None:
                    made_for.agree(key, f"--{key}", value, source)
            if fp8 is not None and made_for.fp8 is not None:
                made_for.agree_on_fp8(fp8, source)
        length = _seq_length(document)
        stretched = shapes.stretched(length)
        dtype = dtype or (made_for.dtype if made_for is not None else DTYPE)
        described = None if cluster is None else cluster.described
        models = {name: Model(m) if isinstance(m, str) else m for name, m in (beside or {}).items()}
        specs = {name: role_model.spec for name, role_model in models.items()}
        plan, notices = load_plan(document, stretched.spec, described, dtype, specs), positions_notice(shapes, length)
        if described is not None:
            written, plan = plan, add_islands(plan, stretched.spec, described)
            notices += [format_added(plan, described)] if plan is not written else []
        optimizer = optimizer or (made_for.optimizer if made_for is not None else OPTIMIZER)
        fp8 = fp8 if fp8 is not None or made_for is None else made_for.fp8
        return Plan(plan, stretched, dtype, optimizer, fp8, source, tuple(notices), models, top_k)

    def role(self, cluster: Cluster | None = None, forwards: int = 1) -> ForwardRole | None:
        """The model in ``beside`` with its plan, which runs ``forwards`` times over each batch; None: there is none, or
        a reference without ranks of its own, which speaks before the first step, or the ranks that train sample.

        Raises:
            UserError: it has another vocabulary, or cannot be cut as the model that is trained.
        """
        for name, model in self.beside.items():
            if model.spec.vocab_size != self.model.spec.vocab_size:
                problem = f"another vocabulary: {model.spec.vocab_size} tokens, {self.model.name} has "
                raise UserError(f"{problem}{self.model.spec.vocab_size}", field=f"--{name}-hf", value=model.name,
                                accepted="a model with the same tokenizer")  # fmt: skip
            top_k = min(self.top_k, model.spec.vocab_size - 1)
            described = None if cluster is None else cluster.described
            if name in ("reference", GENERATOR) and role_plan(self.canonical, name) is None:
                return None
            return role_of(self.canonical, self.model.spec, name, model.spec, top_k, described, forwards)
        return None

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.canonical.ranks

    @property
    def seq_length(self) -> int:
        """Tokens per sequence."""
        return self.canonical.seq_length

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.canonical.global_batch_size

    @property
    def fingerprint(self) -> str:
        """Equal for plans that are one, however they are spelled."""
        return self.canonical.fingerprint()

    def text(self) -> str:
        """As a plan file."""
        return dump_yaml(self.canonical)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a plan file, whole or not at all."""
        write_text(path, "path", self.text())

    def explain(self, cluster: Cluster | None = None) -> str:
        """Boxes: which ranks, and chips where a cluster is given, hold which layers and shares."""
        chips = None if cluster is None else [rank.chip for rank in cluster.described.ranks]
        specs = {name: model.spec for name, model in self.beside.items()}
        return "\n".join([format_plan(self.canonical, self.model.spec, chips),
                          *format_roles(self.canonical, specs, chips)])  # fmt: skip

    def compare(self, other: Plan, cluster: Cluster) -> Comparison:
        """Predicted step time and memory of this plan beside another one's."""
        predictions = predict(self, cluster), predict(other, cluster)
        first, second = predictions
        largest = [max(use.total for use in prediction.memory.values()) for prediction in predictions]
        return Comparison(
            (first.step_seconds, second.step_seconds), (largest[0], largest[1]),
            (first.tokens_per_second, second.tokens_per_second),
        )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """One optimizer step of a plan on a cluster.

    Attributes:
        plan, cluster: what was asked.
        simulated: all that is known of it.
    """

    plan: Plan
    cluster: Cluster
    simulated: step.Prediction
    asked: Question
    compiled: CompiledPlan

    @property
    def step_seconds(self) -> float:
        """From the first forward to the last updated parameter."""
        return self.simulated.step_seconds

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        """In which the step is expected; None where some chip's rates are not measured."""
        return self.simulated.seconds_range

    @property
    def tokens_per_second(self) -> float:
        """Of the whole plan."""
        return self.simulated.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak of the chips used; None where a peak is unknown."""
        return self.simulated.mfu

    @property
    def memory(self) -> Mapping[int, Memory]:
        """By rank."""
        return self.simulated.memory

    @property
    def fits(self) -> bool:
        """No rank needs more than what its chip has, the margin left free, and no node more than its host memory."""
        return not self.simulated.over

    @property
    def over(self) -> list[str]:
        """A line per rank, or node, that does not fit."""
        return [str(excess) for excess in self.simulated.over]

    def explain(self, width: int = 100) -> str:
        """Step time and its parts, memory, and the timeline in ``width`` columns."""
        lines = [format_question(self.asked), "", format_prediction(self.simulated)]
        if self.plan.canonical.islands:
            lines.append(format_islands(self.compiled))
        if self.plan.canonical.outer is not None:
            from hetero_megatron.plans.outer import format_outer

            lines += format_outer(self.plan.canonical, self.plan.model.spec, self.asked.dtype)
        return "\n".join([*lines, format_timeline(self.simulated, width)])

    def schedule(self) -> str:
        """What every stage does in a step, and which ranks meet in what."""
        return format_step(self.plan.canonical, self.compiled.buckets, self.plan.model.spec)

    @property
    def peer_copies(self) -> tuple[PeerCopies, CopyPrediction]:
        """What copies of all ranks' states in peers' memory take (a run with --elastic): memory, and seconds."""
        plan, cluster = self.plan, self.cluster.described
        room = host_room(cluster, {rank: needs.host for rank, needs in self.memory.items()})
        nodes = {rank: cluster.ranks[rank].node for rank in plan.ranks}
        buckets, moments = self.compiled.buckets, moments_of(plan.optimizer)
        copies = copies_of(plan.canonical, buckets, plan.dtype, moments, nodes, room)
        costs = CostModel(plan.model.spec, cluster, plan.seq_length, plan.dtype)
        return copies, predict_copies(copies, costs, self.simulated, room)

    def as_json(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON data; seconds and bytes."""
        return {"asked": self.asked.as_json(), **as_json(self.simulated)}

    def trace(self) -> dict[str, Any]:
        """The timeline as a Perfetto trace (ui.perfetto.dev), as JSON data."""
        return dict(perfetto_trace(self.simulated))

    def page(self) -> str:
        """The timeline as HTML, for a file or a notebook's ``IPython.display.HTML``."""
        return html_page(self.simulated, self.plan.model.name, self.cluster.described, self.asked)


def predict(
    plan: Plan, cluster: Cluster, *, memory_margin: float = CostOptions.margin, routing_stats: str | None = None,
    reference: int = 0, grad_reduce_in_bf16: bool = False, role_forwards: int = 1, overlap_param_gather: bool = False,
    rollouts: Grpo | None = None,
) -> Prediction:  # fmt: skip
    """Simulate one step.

    Args:
        memory_margin: share of a chip's memory that stays free.
        routing_stats: file that a run wrote, of how often experts were chosen; None: all alike.
        reference: how many forwards come before each step: once the base without adapters, as the reference of
            preference pairs (``Preference.forwards``).
        role_forwards: how many forwards a second model on its own ranks runs over each batch (the reference of KTO: 2).
        grad_reduce_in_bf16, overlap_param_gather: as the run's flags of these names say: gradients travel in bf16;
            parameters come beside the next forward.
        rollouts: answers are sampled before each step, on the plan's ranks for a generator or on those that train.

    Raises:
        UserError: the plan does not match the cluster, or rates or links are missing. A plan that does not fit into
            memory raises nothing: see :attr:`Prediction.fits`.
    """
    spec, described = plan.model.spec, cluster.described
    options = CostOptions(
        margin=memory_margin, moments=moments_of(plan.optimizer), muon=plan.optimizer == "muon",
        routing=EVEN if routing_stats is None else routing_of(routing_stats, spec), fp8=plan.fp8, reference=reference,
        gradient_bytes=2.0 if grad_reduce_in_bf16 else None, gather_ahead=overlap_param_gather,
    )  # fmt: skip
    costs = CostModel(spec, described, plan.seq_length, plan.dtype, options)
    compiled = compiled_plan(plan)
    prepared, role = PreparedPlan(compiled), plan.role(cluster, role_forwards)
    if rollouts is not None:
        simulated = predict_rollouts(
            plan.canonical, spec, described, plan.dtype, options, rollouts, role, prepared
        )
    elif role is None:
        simulated = step.predict(plan.canonical, spec, described, plan.dtype, costs, prepared=prepared)
    else:
        simulated = predict_beside(plan.canonical, spec, described, plan.dtype, options, role, prepared)
    return Prediction(plan, cluster, simulated, question(costs, plan.global_batch_size), compiled)


def memory(plan: Plan, cluster: Cluster | None = None) -> Mapping[int, Memory]:
    """Bytes that every rank of the plan needs, by formula; with a cluster also what its libraries' communicators take.

    Faster than :func:`predict`, and it needs no rates.
    """
    spec, buckets = plan.model.spec, compiled_plan(plan).buckets
    needs = estimate_memory(plan.canonical, spec, plan.dtype, moments_of(plan.optimizer), buckets, fp8=plan.fp8)
    described, role = None if cluster is None else cluster.described, plan.role(cluster)
    if described is not None:
        needs = with_communicators(needs, plan.canonical, spec, buckets, described, plan.dtype)
    return needs if role is None else with_role(needs, plan.canonical, role, plan.dtype, LOGITS_BYTES, described)


def compiled_plan(plan: Plan) -> CompiledPlan:
    """For its model and optimizer."""
    return CompiledPlan(plan.canonical, plan.model.spec, muon=plan.optimizer == "muon")


def _model_of(made_for: MadeFor | None, model: Model | str | None) -> Model:
    """The one that is given, else the plan's, with its adapters."""
    if isinstance(model, Model):
        return model
    name = model_name(made_for, model)
    spec = load_model(name)
    if made_for is not None and made_for.mtp_layers:
        spec = replace(spec, mtp_layers=made_for.mtp_layers)
    if made_for is not None and made_for.lora is not None:
        spec = adapted(spec, made_for.lora)
    return Model.of(spec, name)


def model_name(made_for: MadeFor | None, asked: str | None) -> str:
    """What is asked for, else what the plan was made for. UserError: neither."""
    name = asked or (made_for.known_model() if made_for is not None else None)
    if name is None:
        why = "the plan names none" if made_for is None else f"{made_for.model} is not here"
        accepted = "preset, Hugging Face directory or config.json"
        raise UserError(f"missing, and {why}", field="--model", accepted=accepted)
    return name


def _seq_length(document: Entry) -> int:
    """Of a plan file that is not checked yet; 0 where it says none."""
    keys = document.value if isinstance(document.value, dict) else {}
    return keys["seq_length"].integer(1) if "seq_length" in keys else 0
