"""The page of a prediction."""

from __future__ import annotations

import html

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.html.page import charts_html, figures, page, section
from hetero_megatron.html.pictures import (
    PipelineBlock,
    StageBlock,
    asked_list,
    chip_colors,
    cluster_blocks,
    legend,
    memory_bars,
    plan_blocks,
    share_caption,
)
from hetero_megatron.plans.dump import degrees, format_layers
from hetero_megatron.predictor.report.prediction import Question, format_prediction, format_seconds, holdings, mfu_words
from hetero_megatron.predictor.report.timeline import groups, prediction_charts
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import plural, rank_ranges, word


def html_page(
    prediction: Prediction, title: str, cluster: Cluster | None = None, asked: Question | None = None
) -> str:
    """The page of one plan: its blocks, memory, and a chart per distinct pipeline (wheel zooms, dragging moves, double
    click resets); all figures as text at the end."""
    heading = f"{title}: predicted step"
    rows = asked_list(asked.rows()) if asked is not None else ""
    model = asked.model if asked is not None else None
    body = f"<h1>{html.escape(heading)}</h1>{rows}{prediction_pictures(prediction, cluster, model)}"
    return page(heading, body + section("All figures") + f"<pre>{html.escape(format_prediction(prediction))}</pre>")


def prediction_pictures(prediction: Prediction, cluster: Cluster | None = None, model: ModelSpec | None = None) -> str:
    """The sections about a predicted plan; with the model also who holds which tokens and heads."""
    colors = chip_colors([prediction.chips[rank] for rank in sorted(prediction.chips)])
    mfu = [(f"of {mfu_words(prediction)}", f"{prediction.mfu:.1%}")] if prediction.mfu is not None else []
    free = min(prediction.limits[rank] - memory.total for rank, memory in prediction.memory.items())
    parts = [
        figures(
            ("predicted per step", format_seconds(prediction.step_seconds)),
            ("tokens per second", f"{prediction.tokens_per_second:,.0f}"), *mfu,
            ("least free memory of a rank" if free >= 0 else "too much memory on a rank", format_bytes(abs(free))),
        ),
    ]  # fmt: skip
    if cluster is not None:
        nodes: dict[str, list[tuple[int, str]]] = {}
        for rank in cluster.ranks:
            nodes.setdefault(rank.node, []).append((rank.rank, rank.chip))
        kinds = {**colors, **{k: c for k, c in chip_colors([*colors, *cluster.chips]).items() if k not in colors}}
        parts += [section("Cluster", "a square per chip; pale ones are idle"), legend(kinds)]
        parts.append(cluster_blocks(nodes, set(prediction.memory), kinds))
    parts += [section("Pipelines", "blocks as wide as their layers, colored by chip"), legend(colors)]
    parts.append(plan_blocks(_pipeline_blocks(prediction, model), colors))
    parts.append(section("Memory of each rank", "against its limit, the dashed line"))
    memory = {rank: m.parts() for rank, m in prediction.memory.items()}
    parts.append(memory_bars(memory, prediction.limits, prediction.chips))
    parts.append(section("One step on the time axis", "predicted; each row is a stage"))
    parts.append(charts_html(prediction_charts(prediction), prediction.step_seconds))
    return "".join(parts)


def _pipeline_blocks(prediction: Prediction, model: ModelSpec | None) -> list[PipelineBlock]:
    blocks = []
    for group in groups(prediction):
        number = group[0]
        pipeline = prediction.plan.pipelines[number]
        stages = []
        for stage in pipeline.stages:
            count = sum(b - a for a, b in stage.chunks)
            chips = tuple(dict.fromkeys(prediction.chips[rank] for rank in stage.ranks))
            recompute = [f"recompute {stage.recompute}"] if str(stage.recompute) != "none" else []
            ranks = f"{word(len(stage.ranks), 'rank')} {rank_ranges(stage.ranks)}"
            divided = [degrees(stage)] if len(stage.ranks) > 1 else []
            details = ", ".join([plural(count, "layer"), ranks, "+".join(chips), *divided, *recompute])
            if model is not None:
                details = "\n".join([details, *holdings(prediction.plan, stage, model)])
            stages.append(StageBlock(count, f"layers {format_layers(stage)}" if count else "no layers", details, chips))
        caption = share_caption(number, len(group), pipeline.num_micro_batches, pipeline.micro_batch_size)
        blocks.append(PipelineBlock(caption, tuple(stages)))
    return blocks
