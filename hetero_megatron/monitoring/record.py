"""What happened in a run, beside its metrics: ``events.jsonl`` in the --save directory, for ``hetero-megatron report``.

One JSON object per line: ``{"time": seconds since 1970, "kind": …, "text": …, …}``. Every start of the job writes one
with plan, chips and prediction. No torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hetero_megatron.errors import UserError
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.plans.memory.of_plan import moments_of
from hetero_megatron.spec.flops import PLAIN_WORDS
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.files import open_append

if TYPE_CHECKING:
    from hetero_megatron.plans.memory.replicas import PeerCopies
    from hetero_megatron.predictor.cost.cost_options import CostOptions
    from hetero_megatron.predictor.simulate.peer_copies import CopyPrediction
    from hetero_megatron.predictor.simulate.step import Prediction

FILE = "events.jsonl"
# All that there are: ``run_files`` says what each holds.
EventKind = Literal["start", "timeline", "experts", "elastic", "end", "straggler", "error", "launcher"]


def add_event(directory: str | Path, kind: EventKind, text: str, **more: Any) -> None:
    """Append one event; UserError if the file cannot be written."""
    line = json.dumps({"time": time.time(), "kind": kind, "text": text, **more}, separators=(",", ":"))
    try:
        with open_append(Path(directory) / FILE, "--save") as file:
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise UserError(f"{FILE} cannot be written: {error.strerror}", field="--save", value=str(directory)) from error


def expectation(config: RunConfig) -> tuple[Prediction | None, str]:
    """(what the rates of the cluster file say about a step, or None; why it is None or how far it can be believed).

    The sentence is empty where everything was calibrated and no role has ranks of its own.
    """
    assert config.cluster is not None
    from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
    from hetero_megatron.predictor.simulate.step import predict

    sentences = []
    try:
        options, prepared, role = _options(config), PreparedPlan(config.compiled), config.forward_role
        made_for = config.plan, config.spec, config.cluster, config.dtype
        if config.grpo is not None:
            from hetero_megatron.predictor.simulate.rollouts import predict_rollouts

            prediction = predict_rollouts(*made_for, options, config.grpo, role, prepared)
            sentences.append(f"predicted: {prediction.role}")
        elif role is None:
            prediction = predict(*made_for, options=options, prepared=prepared)
        else:
            from hetero_megatron.predictor.simulate.beside import predict_beside

            prediction = predict_beside(*made_for, options, role, prepared)
            sentences += [f"predicted: {prediction.role}"] if role.apart else []
    except UserError as error:
        return None, f"no prediction of the step time: {error}"
    if prediction.assumed:
        source = f"the prediction takes {prediction.describe_assumed()} from data sheets: hetero-megatron calibrate"
        sentences.append(source)
    return prediction, "; ".join(sentences)


def expected_busy(config: RunConfig) -> dict[int, float]:
    """Predicted seconds of compute in a step by rank, as ``busy_seconds`` measures them, where there is an
    :func:`expectation`."""
    from hetero_megatron.predictor.cost.layer_cost import CostModel
    from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
    from hetero_megatron.predictor.simulate.step import StepSimulator

    assert config.cluster is not None
    costs = CostModel(config.spec, config.cluster, config.plan.seq_length, config.dtype, _options(config))
    compute_seconds = StepSimulator(config.plan, costs, PreparedPlan(config.compiled)).computing
    if config.forward_role is None or config.forward_role.apart:
        return compute_seconds
    from hetero_megatron.predictor.simulate.beside import role_costs

    before = role_costs(config.forward_role, config.cluster, config.dtype, _options(config)).busy
    return {rank: seconds + before[rank] for rank, seconds in compute_seconds.items()}


def _options(config: RunConfig) -> CostOptions:
    from hetero_megatron.predictor.cost.cost_options import CostOptions

    preference, role = config.preference, config.forward_role
    loss_words = PLAIN_WORDS
    if config.distillation is not None:
        from hetero_megatron.spec.distillation import likeliest_words

        loss_words = likeliest_words(0)  # of scores in a file: how many tokens it has hardly matters
    return CostOptions(
        moments=moments_of(config.optimizer.name), muon=config.optimizer.name == "muon", fp8=config.fp8,
        logits_bytes=config.logits_bytes, gradient_bytes=2.0 if config.reduce_in_bf16 else None,
        reference=0 if preference is None else preference.forwards,
        loss_words=loss_words if role is None else role.loss_words[0],
        gather_ahead=config.distributed.overlap_param_gather and config.grpo is None,
    )  # fmt: skip


def expected_copies(config: RunConfig, copies: PeerCopies, room: Mapping[str, float]) -> CopyPrediction | None:
    """What copies in peers' memory cost in time, where there is an :func:`expectation`."""
    from hetero_megatron.predictor.cost.layer_cost import CostModel
    from hetero_megatron.predictor.simulate.peer_copies import predict_copies

    prediction = expectation(config)[0] if config.cluster is not None else None
    if config.cluster is None or prediction is None:
        return None
    costs = CostModel(config.spec, config.cluster, config.plan.seq_length, config.dtype, _options(config))
    return predict_copies(copies, costs, prediction, room)


def start_event(
    config: RunConfig, prediction: Prediction | None, busy: Mapping[int, float], chips: Mapping[int, str],
    first_step: int,
) -> dict[str, Any]:
    """What a report needs to know about this start of the job; ``busy``: :func:`expected_busy`, with ``prediction``."""
    from hetero_megatron.predictor.report.timeline import prediction_charts

    predicted = None
    if prediction is not None:
        predicted = {
            "step_seconds": prediction.step_seconds, "parts": dict(prediction.parts),
            "assumed": list(prediction.assumed), "busy": {str(r): s for r, s in busy.items()},
            "charts": prediction_charts(prediction),
            "memory": {
                str(r): {"parts": m.parts(), "limit": prediction.limits[r]} for r, m in prediction.memory.items()
            },
        }  # fmt: skip
    nodes = {}
    if config.cluster is not None:
        nodes = {"nodes": {str(r): config.cluster.ranks[r].node for r in config.plan.ranks}}
    outer = {}
    if config.plan.outer is not None:
        from hetero_megatron.plans.outer import format_outer

        outer = {"outer": format_outer(config.plan, config.spec, config.dtype)}
    return {
        **nodes, **outer, "first_step": first_step, "steps": config.steps, "plan": to_dict(config.plan),
        "fingerprint": config.plan.fingerprint(), "model": asdict(config.spec), "dtype": config.dtype,
        "ranks": list(config.plan.ranks), "chips": {str(r): c for r, c in chips.items()}, "prediction": predicted,
    }  # fmt: skip


def measured_rows(actions: Sequence[Any]) -> list[tuple[str, float, float, int]]:
    """(kind, start, seconds, micro-batch) of a rank's compute actions of one step, from the start of the first."""
    from hetero_megatron.html.page import kind_of

    computing = [t for t in actions if t.action.kind in ("F", "B", "B_INPUT", "W")]
    origin = actions[0].start if actions else 0.0
    return [(kind_of(t.action), t.start - origin, t.end - t.start, t.action.micro_batch) for t in computing]
