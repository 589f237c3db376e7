"""Plans, cluster files and configurations: YAML and JSON that is nearly right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz import mutate
from tests.support import cluster_words
from tests.support.paths import ROOT

CLUSTER = ROOT / "examples" / "clusters" / "testbed.yaml"
PLANS = [ROOT / "examples" / "plans" / name for name in ("demo.yaml", "long_context.yaml", "keys.yaml")]
CLUSTERS = [
    ROOT / "examples" / "clusters" / name for name in ("testbed.yaml", "testbed_context.yaml", "two_nodes.yaml")
]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_scaling": None,
    "attention_bias": False,
    "head_dim": 4,
    "initializer_range": 0.02,
}
CONFIGS: list[dict[str, Any]] = [
    LLAMA,
    {
        **LLAMA,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 32,
        "use_sliding_window": False,
    },
    {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 32,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_inner": None,
    },
]


def _write(rng: random.Random, path: Path, value: Any, as_yaml: bool) -> None:
    """The value after changes to its structure, its text, or its place."""
    for _ in range(rng.randint(0, 2)):
        value = mutate.tree(rng, value)
    if as_yaml and rng.random() < 0.7:
        data = yaml.safe_dump(value, sort_keys=False).encode("utf-8", "surrogatepass")
    else:
        data = json.dumps(value, indent=1).encode()
    change = rng.random()
    if change < 0.35:
        data = mutate.bytes_of(rng, data)
    elif change < 0.4 and as_yaml:
        data = mutate.alias_bomb(rng) + data
    path.write_bytes(data)
    if rng.random() < 0.03:
        mutate.file(rng, path)


def plan(rng: random.Random, folder: Path) -> list[str]:
    _write(rng, folder / "plan.yaml", yaml.safe_load(rng.choice(PLANS).read_text()), True)
    return ["predict", "--plan", str(folder / "plan.yaml"), "--cluster", str(CLUSTER), "--model", "tiny", "--json"]


def cluster(rng: random.Random, folder: Path) -> list[str]:
    _write(rng, folder / "cluster.yaml", yaml.safe_load(rng.choice(CLUSTERS).read_text()), True)
    where = ["--cluster", str(folder / "cluster.yaml"), "--model", "tiny", "--json"]
    if rng.random() < 0.7:
        return ["predict", "--plan", str(PLANS[0]), *where]
    return [
        "plan",
        *where,
        "--seq-length",
        "128",
        "--global-batch-size",
        "8",
        "--time-limit",
        "3",
        "--quiet",
        "--no-baselines",
    ]


def config(rng: random.Random, folder: Path) -> list[str]:
    _write(rng, folder / "config.json", rng.choice(CONFIGS), False)
    model = str(folder if rng.random() < 0.3 else folder / "config.json")
    return [
        "predict",
        "--plan",
        str(ROOT / "tests" / "fuzz" / "two_layers.yaml"),
        "--cluster",
        str(CLUSTER),
        "--model",
        model,
        "--json",
    ]


def words(rng: random.Random, folder: Path) -> list[str]:
    """A cluster file with hostile words, for a launcher."""
    data = cluster_words.BASE
    for _ in range(rng.choice((1, 1, 2, 3))):
        word = rng.choice(cluster_words.HOSTILE)
        if rng.random() < 0.5:
            word = "".join(rng.choice("ab1-._/ $(){}'\"`;|&<>\n\\@%:,=#~") for _ in range(rng.randint(1, 12)))
        data = cluster_words.changed(data, rng.choice(list(cluster_words.places(data))), word)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    via = rng.choice(("print", "slurm", "kubernetes"))
    return ["launch", "--cluster", str(folder / "cluster.yaml"), "--via", via, "--", *cluster_words.COMMAND]
