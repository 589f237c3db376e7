"""Valid questions to the planner and the predictor: models x adapters x fp8 x experts x clusters x sequence x batch.

Nothing is damaged here. What is asked for may not fit or not be possible, which is a refusal in one line; an answer is
checked: seconds are finite and positive, no memory is negative, and a plan that was written is predicted with the
number that the search gave it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.cluster.catalogue import CHIP_DTYPES, CHIPS
from hetero_megatron.spec.lora import EVERY_TARGET
from tests.support.moe_models import MOE_FAMILIES
from tests.support.random_plans import random_experts, random_features, random_model, random_plan

PRESETS = ("tiny", "tiny", "gpt2", "gpt2", "opt-350m", "llama3-8b", "llama2-13b", "qwen2.5-7b", "megatron-18b")
SEQUENCES = (1, 2, 7, 48, 64, 64, 128, 1000, 1024, 4096, 32768)
KNOWN = [name for name, chip in CHIPS.items() if {"bf16", "fp32"} <= set(chip.flops)]  # how fast they are
HOSTILE = (  # as targets of adapters: they take for ever, nest too deep, or are no expression
    r"(.*a)*(.*b)*(.*c)*!", r"(([a-z_.0-9])+)+$!", r"(.|..|...)*x{9}", "(" * 2000 + "q" + ")" * 2000, r"(?<=q*)_proj",
)  # fmt: skip
BATCHES = (1, 2, 3, 7, 8, 8, 13, 64, 100, 1024)


def case(rng: random.Random, folder: Path) -> list[str]:
    """Write model, cluster and perhaps a plan; returns the words of ``plan`` or ``predict``."""
    config = _config(rng)
    model = rng.choice(PRESETS)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        model = str(folder / "config.json")
    cluster = _cluster(rng)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster, sort_keys=False))
    where = ["--model", model, "--cluster", str(folder / "cluster.yaml"), "--json", *_numbers(rng)]
    if rng.random() < 0.3:
        plan = _plan(rng, config, cluster, "--fp8-format" in where)
        (folder / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        return ["predict", "--plan", str(folder / "plan.yaml"), *where]
    long = config is not None and rng.random() < 0.9  # mostly within the positions of a small model
    seq = rng.choice(SEQUENCES[:6] if long else SEQUENCES)
    words = ["plan", "--out", str(folder / "found.yaml"), "--quiet", "--time-limit", "0.8", *where]
    return [*words, "--seq-length", str(seq), "--global-batch-size", str(rng.choice(BATCHES)), *_choices(rng)]


def run(words: list[str]) -> tuple[int, str]:
    """Run the program on a case: (exit code, what is wrong with its answer, or "").

    ``predict`` ends with 1 where a plan does not fit, after it has said everything else; that is 0 here.
    """
    code, text = _said(words)
    if words[0] == "predict":
        return _looked_at(code, text)
    if code != 0:
        return code, ""
    found = json.loads(text)
    wrong = _bad_numbers(found)
    if wrong:
        return code, wrong
    bound = found["bound"]["step_seconds"] if found["bound"] else 0.0
    if not 0 <= bound <= found["step_seconds"] * (1 + 1e-9):
        return code, f"the bound is {bound} s, the plan takes {found['step_seconds']} s"
    again = ["predict", "--plan", _value(words, "--out"), *_kept(words)]
    code, text = _said(again)
    if code != 0:
        return 0, f"what plan has made cannot be predicted: exit code {code}"
    predicted = json.loads(text)
    if not math.isclose(predicted["step_seconds"], found["step_seconds"], rel_tol=1e-9):
        return code, f"plan says {found['step_seconds']} s, predict {predicted['step_seconds']} s"
    memory = {str(row["rank"]): row["memory"]["total"] for row in predicted["ranks"]}
    if memory != found["memory"]:
        return code, "plan and predict differ in memory"
    return _looked_at(code, text)


def _said(words: list[str]) -> tuple[int, str]:
    from hetero_megatron.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of NumPy: nan or an overflow
        return main(words), out.getvalue()


def _looked_at(code: int, text: str) -> tuple[int, str]:
    if code == 2:
        return code, ""
    found = json.loads(text)
    if code == 1 and not found["fits"]:
        code = 0
    return code, _bad_numbers(found)


def _bad_numbers(found: dict[str, Any]) -> str:
    """The first number of an answer that cannot be."""
    if not (0 < found["step_seconds"] < math.inf and 0 < found["tokens_per_second"] < math.inf):
        return f"step_seconds = {found['step_seconds']}, tokens_per_second = {found['tokens_per_second']}"

    def look(value: Any, path: str) -> str:
        if isinstance(value, dict):
            return next(filter(None, (look(each, f"{path}.{key}") for key, each in value.items())), "")
        if isinstance(value, list):
            return next(filter(None, (look(each, path) for each in value)), "")
        number = isinstance(value, int | float)
        return f"{path} = {value}" if number and not (math.isfinite(value) and value >= -1e-9) else ""

    return look({key: value for key, value in found.items() if key != "plan"}, "")


def _value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def _kept(words: list[str]) -> list[str]:
    """Flags of ``plan`` that ``predict`` must be given too; the plan file says the rest."""
    flags = [flag for flag in ("--cluster", "--model", "--memory-margin") if flag in words]
    return ["--json", *(word for flag in flags for word in (flag, _value(words, flag)))]


def _config(rng: random.Random) -> dict[str, Any] | None:
    """A Hugging Face configuration; None: a preset."""
    choice = rng.random()
    if choice < 0.35:
        return None
    if choice < 0.65:
        return dict(rng.choice(list(MOE_FAMILIES.values())))
    config = random_model(rng)
    if config["model_type"] == "llama":
        config |= random_features(rng, config, True)
    return config


def _cluster(rng: random.Random) -> dict[str, Any]:
    """1 to 3 kinds of nodes, 8 chips at most: from the catalogue, or with odd memory and speeds."""
    nodes, chips, left = [], dict[str, Any](), 8
    for name in ("a", "b", "c")[: rng.choice((1, 2, 2, 3))]:
        each = rng.choice([n for n in (1, 1, 2, 3, 4) if n <= left])
        count = rng.choice([n for n in (1, 1, 2, 3) if n * each <= left])
        left -= each * count
        chip = rng.choice(KNOWN if rng.random() < 0.9 else list(CHIPS))
        if rng.random() < 0.4:
            chip = f"chip-{name}"
            chips[chip] = {"memory": f"{rng.choice((8, 1024, 2048, 4096, 65536))} MiB"} | _speeds(rng)
        nodes.append({"name": name, "count": count, "chip": chip, "chips_per_node": each})
        if left <= 0:
            break
    between = {"bandwidth": f"{rng.choice((0.001, 0.1, 1, 25))} GB/s", "latency": f"{rng.choice((0, 10, 5000))} us"}
    links = {"inter_node": between, "intra_node": {"bandwidth": "20 GB/s", "latency": "5 us"}}
    cluster = {"version": 1, "nodes": nodes, "links": links}
    return cluster | ({"chips": chips} if chips else {})


def _speeds(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"emulate": {"speed": rng.choice((0.01, 0.3, 1.0))}}
    rates = {"memory_bandwidth": f"{rng.choice((1, 900))} GB/s", "host_bandwidth": "8 GB/s"}
    dtypes = rng.choice((CHIP_DTYPES, CHIP_DTYPES, ("fp32", "bf16", "fp16")))
    return rates | {"dtypes": list(dtypes), "tflops": dict.fromkeys(dtypes, rng.choice((0.01, 10, 300)))}


def _plan(rng: random.Random, config: dict[str, Any] | None, cluster: dict[str, Any], fp8: bool) -> dict[str, Any]:
    """A random unequal plan; for a preset it mostly has the wrong number of layers, which is refused."""
    keys = config or {"num_hidden_layers": 6, "num_attention_heads": 8}
    layers, heads = (
        keys.get(a, keys.get(b)) for a, b in (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    )
    ranks = sum(node["count"] * node["chips_per_node"] for node in cluster["nodes"])
    plan = random_plan(rng, int(layers), int(heads), rng.choice((48, 64)), ranks)
    for stage in [stage for pipeline in plan["pipelines"] for stage in pipeline["stages"]]:
        count = keys.get("num_experts", keys.get("num_local_experts", keys.get("n_routed_experts")))
        if count and rng.random() < 0.5 and "context" not in stage:
            stage["experts"] = random_experts(rng, stage["ranks"], count, 9)
        if fp8 and rng.random() < 0.3:
            stage["dtype"] = "fp8"
    return plan | _outer(rng, plan)


def _outer(rng: random.Random, plan: dict[str, Any]) -> dict[str, Any]:
    """Sometimes outer steps: each pipeline an island, or one that cannot be."""
    if rng.random() > 0.3:
        return {}
    islands: Any = [[rank for stage in p["stages"] for rank in _ranks(stage["ranks"])] for p in plan["pipelines"]]
    islands = islands if rng.random() < 0.8 else rng.choice(([], [[0]], [0, 0], "all", [islands[0], islands[0]]))
    keys = {"every": (1, 4, 8, 0), "fragments": (1, 2, 3), "delay": (0, 1, 7), "mixing": (0.0, 0.5, 1.0, 2),
            "lr": (0.7, 0), "momentum": (0, 0.9, 1)}  # fmt: skip
    chosen = {key: rng.choice(values) for key, values in keys.items() if rng.random() < 0.6}
    return {"outer": {"islands": islands, "every": 8} | chosen}


def _ranks(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


def _numbers(rng: random.Random) -> list[str]:
    """Flags that plan and predict have alike."""
    words = ["--dtype", rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))] if rng.random() < 0.8 else []
    if rng.random() < 0.3:
        words += ["--optimizer", rng.choice(("adam", "sgd", "muon"))]
    if rng.random() < 0.25:
        words += [
            "--fp8-format",
            rng.choice(("e4m3", "hybrid")),
            "--fp8-recipe",
            rng.choice(("tensorwise", "blockwise")),
        ]
    if rng.random() < 0.4:
        words += ["--lora-rank", str(rng.choice((1, 8, 64)))]
        if rng.random() < 0.4:
            words += [
                "--lora-targets",
                *rng.choice((("o_proj",), ("down_proj", "o_proj"), rng.sample(EVERY_TARGET, 2))),
            ]
        elif rng.random() < 0.4:
            words += rng.choice((
                ["--lora-layers", rng.choice(("0", "1-2", "0-1"))], ["--lora-sites", "0:o_proj:3", "1:q_proj,o_proj"],
                ["--lora-targets", r".*[02468]\..*o_proj"], ["--lora-targets", rng.choice(HOSTILE)],
            ))  # fmt: skip
        words += ["--use-dora"] * (rng.random() < 0.2)
        words += ["--lora-base-dtype", "int8"] * (rng.random() < 0.2)
    if rng.random() < 0.2:
        words += ["--memory-margin", rng.choice(("0", "0.5", "0.99"))]
    return words


def _choices(rng: random.Random) -> list[str]:
    """What only plan has."""
    words = ["--no-baselines"] * (rng.random() < 0.7)
    for flag, values in (
        ("--micro-batch-size", ("1", "1", "1", "2", "5")),
        ("--recompute", ("none", "elementwise", "selective", "full")),
        ("--context", ("always", "never")), ("--more-schedules", ("always", "never")),
        ("--offload", ("always", "never")),
    ):  # fmt: skip
        if rng.random() < 0.15:
            words += [flag, rng.choice(values)]
    return words
