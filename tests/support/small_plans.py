"""A small model, and plans for it written by hand."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}


def plan(pipelines: list[dict[str, Any]], seq_length: int = 10, schedule: str = "1f1b") -> dict[str, Any]:
    batch = sum(p["micro_batch_size"] * p["num_micro_batches"] for p in pipelines)
    return {
        "version": 1,
        "seq_length": seq_length,
        "global_batch_size": batch,
        "schedule": schedule,
        "pipelines": pipelines,
    }


def stage(ranks: list[int], layers: list[int], **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "layers": layers, **more}


def pipe(mbs: int, count: int, *stages: dict[str, Any]) -> dict[str, Any]:
    return {"micro_batch_size": mbs, "num_micro_batches": count, "stages": list(stages)}
