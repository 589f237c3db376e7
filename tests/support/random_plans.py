"""Random small models and random asymmetric plans, as the dictionaries that users would write."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hetero_megatron.plans.program import stored_schedule
from hetero_megatron.plans.schema import expand
from hetero_megatron.schedule.adaptive import adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders
from hetero_megatron.utils.yaml_document import from_data


def composition(rng: random.Random, total: int, parts: int, least: int = 0) -> list[int]:
    """``parts`` integers >= ``least`` that sum to ``total``."""
    free = total - parts * least
    cuts = sorted(rng.randint(0, free) for _ in range(parts - 1))
    return [b - a + least for a, b in zip([0, *cuts], [*cuts, free], strict=True)]


def random_context(rng: random.Random, ranks: list[int], seq_length: int, heads: int) -> dict[str, Any]:
    """Context groups over two ranks or more: keys ``context``, ``order``, ``kv`` and, with TP members, ``tp_split``."""
    tp = rng.choice([t for t in (1, 1, 2, 3) if len(ranks) % t == 0 and len(ranks) > t])
    sizes = [tp] * (len(ranks) // tp)
    if len(ranks) > 2 and rng.random() < 0.2:
        sizes = composition(rng, len(ranks), rng.randint(2, len(ranks) - 1), least=1)
    tp, members = max(sizes), [ranks[sum(sizes[:i]) :][:size] for i, size in enumerate(sizes)]
    groups = composition(rng, len(members), rng.randint(1, min(4, len(members))), least=1)
    # Members may own no token, but a TP group needs one per rank for sequence parallelism.
    while True:
        tokens = composition(rng, seq_length, len(members))
        if all(size == 1 or count >= size for size, count in zip(sizes, tokens, strict=True)):
            break
    stage: dict[str, Any] = {"context": [], "order": rng.choice(["zigzag", "zigzag", "contiguous"])}
    start = 0
    for size in groups:
        mine = members[start : start + size]
        stage["context"].append(
            {
                "ranks": mine if tp > 1 else [m[0] for m in mine],
                "tokens": tokens[start : start + size],
                "heads": composition(rng, heads, size),
            }
        )
        start += size
    if tp > 1 and rng.random() < 0.5:
        splits = [[rng.randint(1, 3) for _ in m] for m in members]
        stage["tp_split"] = splits[0] if len(set(sizes)) == 1 else splits
    if rng.random() < 0.7:
        transport = rng.choice(["ring", "ring", "ring", "gather"])
        stage["kv"] = {"transport": transport, "block": rng.choice([0, 0, 1, 3, 8, 20])}
    return stage


def random_stage(
    rng: random.Random, ranks: list[int], layers: list[list[int]], mbs: int, heads: int, seq_length: int
) -> dict[str, Any]:
    """``layers``: the ranges of its chunks."""
    size = len(ranks)
    stage: dict[str, Any] = {"ranks": ranks, "layers": layers if len(layers) > 1 else layers[0]}
    if size > 1 and rng.random() < 0.35:
        stage |= random_context(rng, ranks, seq_length, heads)
    else:
        tp = rng.choice([tp for tp in range(1, min(size, 4) + 1) if size % tp == 0 and size // tp <= mbs])
        stage["tp"] = tp
        if tp > 1 and rng.random() < 0.6:
            stage["tp_split"] = [rng.randint(1, 4) for _ in range(tp)]
        if size // tp > 1:
            stage["dp_split"] = composition(rng, mbs, size // tp, least=1)
    recompute = rng.choice(["none", "selective", "elementwise", "elementwise", "full", "first"])
    if recompute == "first":
        stage["recompute"] = {"first": rng.randint(0, sum(b - a for a, b in layers))}
    else:
        stage["recompute"] = recompute
    if rng.random() < 0.3:
        stage["optimizer"] = {"share": rng.choice([0, 2, 5])}
    return stage


def random_pipeline(
    rng: random.Random, ranks: list[int], num_layers: int, heads: int, seq_length: int, chunks: int = 1
) -> dict[str, Any]:
    """``chunks``: ranges of layers per stage, of which some may be empty."""
    mbs = rng.randint(1, 3)
    while True:
        stages = rng.randint(1, min(len(ranks), num_layers + 2))
        sizes = composition(rng, len(ranks), stages, least=1)
        if all(any(s % tp == 0 and s // tp <= mbs for tp in range(1, min(s, 4) + 1)) for s in sizes):
            break
    # A first or last stage may hold the embedding or the head alone; one between must hold layers.
    while True:
        counts = composition(rng, num_layers, stages * chunks)
        if all(sum(counts[s::stages]) for s in range(1, stages - 1)):
            break
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    out, rank = [], 0
    for s, size in enumerate(sizes):
        layers = [[bounds[i], bounds[i + 1]] for i in range(s, len(counts), stages)]
        out.append(random_stage(rng, ranks[rank : rank + size], layers, mbs, heads, seq_length))
        rank += size
    return {"micro_batch_size": mbs, "num_micro_batches": rng.randint(1, 4 if chunks == 1 else 7), "stages": out}


def random_weights(rng: random.Random, ranks: int, tp: int) -> dict[str, Any]:
    """The key ``weights`` of a stage; ``tp``: of all its units, 0 where they have unlike ones."""
    shard = [rng.choice([0, 1, 1, 2, 5]) for _ in range(ranks)]
    kept = tp and all(sum(shard[t::tp]) for t in range(tp))
    gather = rng.choice(["layer", "layer", "micro-batch", "step"])
    found: dict[str, Any] = {"shard": shard if kept else [max(s, 1) for s in shard], "gather": gather}
    return found if gather == "step" else found | {"reshard_after_forward": rng.random() < 0.7}


def divide_weights(rng: random.Random, plan: dict[str, Any], heads: int) -> None:
    """Have most stages that can divide their weights do so."""
    canonical, _ = expand(from_data(plan), heads)
    stages = [spelled for pipeline in plan["pipelines"] for spelled in pipeline["stages"]]
    for spelled, stage in zip(stages, canonical.stages, strict=True):
        splits = {unit.tp_split for unit in stage.units}
        if len(stage.units) > 1 and rng.random() < 0.7:
            tp = stage.units[0].tp if len(splits) == 1 else 0
            spelled["weights"] = random_weights(rng, len(stage.ranks), tp)


def random_plan(
    rng: random.Random, num_layers: int, heads: int, seq_length: int, ranks: int, most_pipelines: int = 3
) -> dict[str, Any]:
    """A plan over exactly ``ranks`` ranks with one pipeline or some; ranks in random order over their stages."""
    pipelines = []
    # Many adaptive ones of little pipelines turn out to be 1F1B, or interleaved 1F1B.
    schedule = rng.choice(["1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble", *["adaptive"] * 4])
    order = list(range(ranks))
    rng.shuffle(order)
    start = 0
    for size in composition(rng, ranks, rng.randint(1, min(most_pipelines, ranks)), least=1):
        many, some = rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 3])
        chunks = {"interleaved": many, "zero-bubble": some, "adaptive": some}.get(schedule, 1)
        pipelines.append(random_pipeline(rng, order[start : start + size], num_layers, heads, seq_length, chunks))
        if schedule == "zero-bubble" and rng.random() < 0.5:
            stages = len(pipelines[-1]["stages"])
            pipelines[-1]["in_flight"] = [rng.randint(1, 2 * stages) for _ in range(stages)]
        start += size
    batch = sum(p["micro_batch_size"] * p["num_micro_batches"] for p in pipelines)
    plan = {
        "version": 1,
        "seq_length": seq_length,
        "global_batch_size": batch,
        "schedule": schedule,
        "pipelines": pipelines,
    }
    if schedule == "adaptive":
        adapt(rng, plan, heads)
    if ranks > 2 and rng.random() < 0.6:
        rng.shuffle(order)
        plan["islands"] = [
            order[sum(sizes[:i]) :][:size]
            for sizes in [composition(rng, ranks, rng.randint(1, ranks // 2), least=1)]
            for i, size in enumerate(sizes)
        ]
    return plan


def random_experts(
    rng: random.Random, ranks: list[int], count: int, columns: int, most_groups: int = 3
) -> list[dict[str, Any]]:
    """Groups over ``ranks`` in random order that divide ``count`` experts: unequally, some replicated, some ranks
    without any, some sharing the columns of each."""
    order = rng.sample(ranks, len(ranks))
    groups, start = [], 0
    for size in composition(rng, len(order), rng.randint(1, min(most_groups, len(order))), least=1):
        mine = order[start : start + size]
        start += size
        members: list[list[int]] = []
        while mine:
            wide = rng.choice([1, 1, 1, 2, 3])
            members.append(mine[:wide])
            mine = mine[wide:]
        bounds = [0]
        for part in composition(rng, count, len(members)):
            bounds.append(bounds[-1] + part)
        intervals = [[a, b] if a < b else [] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        for i, pair in enumerate(intervals):
            if rng.random() < 0.25:  # more than its own: these experts are replicated
                a, b = pair or [rng.randrange(count)] * 2
                intervals[i] = [rng.randint(0, a), rng.randint(max(b, 1), count)]
        splits = [[rng.randint(1, 3) for _ in member] for member in members]
        groups.append({"ranks": [m if len(m) > 1 else m[0] for m in members], "experts": intervals, "split": splits})
    assert columns >= 9, "every split leaves each rank a column"
    return groups


def adapt(rng: random.Random, plan: dict[str, Any], heads: int) -> None:
    """Store schedules that were made for stages of random speed and memory; another one by name where none gains."""
    canonical, _ = expand(from_data({**plan, "schedule": "interleaved"}), heads)
    made = False
    for spelled, pipeline in zip(plan["pipelines"], canonical.pipelines, strict=True):
        stages = tuple(_random_chunks(rng, pipeline.chunks, len(pipeline.stages)) for _ in pipeline.stages)
        links = tuple(LinkTimes(rng.uniform(0, 0.5), rng.uniform(0, 0.5)) for _ in stages)
        if pipeline.chunks == 1:
            times = PipelineTimes(tuple(chunks[0] for chunks in stages), links[1:])
            found = adaptive(times, pipeline.num_micro_batches, effort=20_000)
        else:
            chunked = ChunkedTimes(stages, links if len(stages) > 1 else ())
            found = search_adaptive_chunks(chunked, pipeline.num_micro_batches, effort=10_000).schedule
        if found.name == "adaptive":
            made = True
            spelled["schedule"] = stored_schedule(replace(pipeline, orders=stored_orders(found)))
    ranges = [stage["layers"] for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    chunks = any(len(layers) > 1 and isinstance(layers[0], list) for layers in ranges)
    plan["schedule"] = "adaptive" if made else "interleaved" if chunks else "1f1b"


def _random_chunks(rng: random.Random, chunks: int, stages: int) -> tuple[StageTimes, ...]:
    return tuple(
        StageTimes(
            forward_seconds=rng.uniform(0.5, 2), input_gradient_seconds=rng.uniform(0.5, 2),
            weight_gradient_seconds=rng.uniform(0.2, 1), memory_bytes=rng.randint(chunks, 2 * chunks * stages),
        )
        for _ in range(chunks)
    )  # fmt: skip


def random_model(rng: random.Random) -> dict[str, Any]:
    """A tiny Hugging Face config: family, GQA, ties, biases, odd vocabulary and feed-forward sizes."""
    family = rng.choice(["llama", "llama", "mistral", "qwen2", "qwen3", "gpt2"])
    heads = rng.choice([4, 4, 6, 8])
    head_dim = rng.choice([4, 8])
    layers = rng.randint(1, 5)
    vocab = rng.choice([37, 61, 64])
    if family == "gpt2":
        return {
            "model_type": "gpt2",
            "n_layer": layers,
            "n_embd": heads * head_dim,
            "n_head": heads,
            "n_inner": rng.choice([None, 50]),
            "vocab_size": vocab,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    config = {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        "head_dim": head_dim,
        "intermediate_size": rng.choice([20, 33, 48]),
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "tie_word_embeddings": rng.random() < 0.4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    if family == "mistral":
        config["sliding_window"] = None
    return config


FULL, SLIDING = "full_attention", "sliding_attention"
MIXTURES = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "llama4_text")


def random_features(rng: random.Random, config: dict[str, Any], experts: bool) -> dict[str, Any]:
    """Keys that make a Llama of :func:`random_model` another family, with features that Llama does not have; with
    ``experts`` perhaps a mixture of experts. Empty for a half of the calls."""
    if rng.random() < 0.5:
        return {}
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    windows = {"sliding_window": rng.randint(1, 9), "layer_types": [rng.choice([FULL, SLIDING]) for _ in range(layers)]}
    found = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"}
    if experts and rng.random() < 0.4:
        return found | random_mixture(rng, heads, windows)
    found |= rng.choice(
        [
            {"model_type": "gemma2", "query_pre_attn_scalar": rng.randint(3, 9), "attn_logit_softcapping": 2.0,
             "hidden_act": "gelu_pytorch_tanh"} | windows,
            {"model_type": "gemma3_text", "final_logit_softcapping": rng.choice([None, 3.0]),
             "hidden_act": "gelu_pytorch_tanh"} | windows,
            {"model_type": "olmo2", "attention_bias": rng.random() < 0.5},
            {"model_type": "olmo3"} | windows,
            {"model_type": "smollm3", "no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]},
            {"model_type": "glm4", "partial_rotary_factor": rng.choice([0.5, 1.0])},
            {"model_type": "phi3", "partial_rotary_factor": rng.choice([0.5, 1.0])},
            {"model_type": "granite", "residual_multiplier": 0.3, "logits_scaling": 4.0, "attention_multiplier": 0.4},
            {"model_type": "qwen3", "use_sliding_window": True} | windows,
            {"model_type": "exaone4"} | windows,
            {"model_type": "helium", "attention_bias": rng.random() < 0.5},
            {"model_type": "nemotron", "hidden_act": "relu2", "mlp_bias": rng.random() < 0.5},
            {"model_type": "gpt_neox", "hidden_act": "gelu", "num_key_value_heads": heads, "rotary_pct": 0.5,
             "use_parallel_residual": rng.random() < 0.7},
            {"model_type": "phi", "hidden_act": "gelu_new", "qk_layernorm": rng.random() < 0.5},
            {"model_type": "cohere", "use_qk_norm": rng.random() < 0.5, "logit_scale": 0.3},
            {"model_type": "cohere2"} | windows,
            {"model_type": "stablelm", "use_parallel_residual": rng.random() < 0.7, "partial_rotary_factor": 0.5},
            {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "use_bias": rng.random() < 0.5},
            {"model_type": "llama",
             "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        ]
    )  # fmt: skip
    return found


def random_mixture(rng: random.Random, heads: int, windows: dict[str, Any]) -> dict[str, Any]:
    """Keys of a mixture of experts with the attention that its family has."""
    family, count = rng.choice(MIXTURES), rng.choice([4, 6])
    found: dict[str, Any] = {"model_type": family, "num_experts_per_tok": rng.randint(1, 3), "rope_theta": 10000.0}
    if family == "gpt_oss":
        return found | windows | {
            "num_local_experts": count, "swiglu_limit": rng.choice([0.5, 7.0]),
            "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
        }  # fmt: skip
    if family == "mixtral":
        return found | {"num_local_experts": count}
    if family == "llama4_text":
        return found | {
            "num_local_experts": count, "interleave_moe_layer_step": rng.choice([1, 2]), "intermediate_size_mlp": 20,
            "attention_chunk_size": rng.randint(1, 9), "no_rope_layer_interval": rng.randint(1, 3), "floor_scale": 3,
            "use_qk_norm": rng.random() < 0.7,
        }  # fmt: skip
    found |= {"moe_intermediate_size": rng.choice([9, 12]), "norm_topk_prob": rng.random() < 0.5}
    if family == "qwen3_moe":
        return found | {"num_experts": count, "decoder_sparse_step": rng.choice([1, 2])}
    found |= {
        "n_routed_experts": count, "n_shared_experts": rng.randint(1, 2), "first_k_dense_replace": rng.randint(0, 2),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }  # fmt: skip
    grouped = rng.random() < 0.5
    limits = {"n_group": 2, "topk_group": 1} if grouped and count == 6 else {"n_group": 1, "topk_group": 1}
    if family == "glm4_moe":
        return found | limits | {"use_qk_norm": rng.random() < 0.5, "num_nextn_predict_layers": 0}
    found |= {
        "num_key_value_heads": heads, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": rng.randint(2, 6),
        "v_head_dim": rng.randint(3, 9), "kv_lora_rank": rng.randint(4, 10),
        "q_lora_rank": rng.choice([None, rng.randint(4, 10)]),
    }  # fmt: skip
    if family == "deepseek_v2":
        return found | {"norm_topk_prob": False}
    return found | limits | {"num_nextn_predict_layers": 0}
