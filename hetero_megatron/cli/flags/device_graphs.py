"""--cuda-graph-impl and its companions: where layers run as device graphs, and what is refused beside them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.data import DataConfig
from hetero_megatron.plan import Plan
from hetero_megatron.plan.program import splits_backward
from hetero_megatron.spec import ModelSpec


def build_graphs(
    args: Arguments, plan: Plan, spec: ModelSpec, data: DataConfig | None
) -> int | None:
    """Steps after which layers run as graphs; None: they never do."""
    if args["cuda_graph_impl"] == "transformer_engine":
        args.notices.append(
            "--cuda-graph-impl transformer_engine: Transformer Engine captures nothing here (local captures layers)"
        )
    if args["cuda_graph_impl"] != "local":
        return None
    scope = args["cuda_graph_scope"] or ["full"]
    if list(scope) != ["full"]:
        raise flag_error("cuda_graph_scope", " ".join(scope), "whole layers are captured, no parts of them", "full")
    problem = next(chain(_in_run(args, data), _in_plan(plan, spec)), None)
    if problem is not None:
        raise flag_error("cuda_graph_impl", "local", problem, "none")
    return int(args["cuda_graph_warmup_steps"])


def _in_run(args: Arguments, data: DataConfig | None) -> Iterator[str]:
    """What is not the same for every micro-batch, or is not computed by the launches alone."""
    if args["compile"]:
        yield "layers that torch.compile has changed (--compile) cannot be captured"
    if data is not None and (data.sft or data.reset_position_ids or data.reset_attention_mask):
        yield "documents and positions are others in every sample (--sft, --reset-position-ids, --reset-attention-mask)"
    if args["rampup_batch_size"] is not None:
        yield "micro-batches are not all of one size (--rampup-batch-size)"
    if args.has("dump_layers", "capture_operators", "check_operators"):
        yield "what a graph computes cannot be watched (precision alignment)"


def _in_plan(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    if spec.moe is not None:
        yield "how many rows an expert has is known when it runs"
    if splits_backward(plan):
        yield f"the {plan.schedule} schedule puts off weight gradients"
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            where = f"pipelines[{p}].stages[{s}]"
            if any(unit.tp > 1 for unit in stage.units):
                yield f"layers of {where} communicate: it has tensor parallelism"
            if len({unit.sequences for unit in stage.units}) < len(stage.units):
                yield f"layers of {where} communicate: it has context groups"
            if stage.optimizer.offload:
                yield f"the optimizer of {where} is in host memory"
