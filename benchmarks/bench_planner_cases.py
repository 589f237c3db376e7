"""Plans of 81 cases by ``hetero-megatron plan``, recorded and compared: what a change does to the planner's answers.

    python benchmarks/bench_planner_cases.py --record FILE [--only TEXT]
    python benchmarks/bench_planner_cases.py --compare FILE [--only TEXT]

The clusters of papers under examples/, clusters for the testbed, random ones, long contexts, offloaded optimizers, lost
and added nodes; and small ones for what the others leave out: experts (equal, uneven, with replicas), fp8, adapters,
fast links between unlike chips, many kinds of nodes (METIS), chips of one type that are best alone, clusters of two
vendors. Only the command is used, so that the two sides may be unlike inside. A case that is predicted to be slower by
more than 0.5 % than the record is named; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine

CLUSTERS = Path(__file__).resolve().parent.parent / "examples" / "clusters"
PAPERS = {  # cluster file: (model, tokens, sequences)
    "h2_1024": ("llama2-70b", 4096, 1024), "hethub_768": ("llama2-70b", 4096, 1536),
    "hethub_ascend": ("llama2-70b", 4096, 512), "hethub_metax": ("llama2-70b", 4096, 512),
    "hethub_iluvatar": ("llama2-13b", 4096, 512), "hethub_mthreads": ("llama2-70b", 4096, 512),
    "hexiscale_1": ("llama2-7b", 4096, 64), "hexiscale_2": ("llama2-13b", 4096, 64),
    "hexiscale_3": ("llama2-7b", 4096, 64), "hexiscale_case": ("llama2-7b", 4096, 32),
    "sailor_32_96": ("llama2-7b", 2048, 512), "sailor_80_240": ("llama2-7b", 2048, 512),
    "selene_64": ("llama2-13b", 2048, 256),
}  # fmt: skip
CHIPS = ("A100-80-SXM", "A100-40-SXM", "H100-SXM", "H20", "L40S", "V100-32-SXM2", "RTX4090", "MI250X")
LOSS = 0.005


def cases(folder: Path) -> dict[str, list[str]]:
    """Words for ``plan`` by name; random clusters are written to ``folder``."""
    found: dict[str, list[str]] = {}

    def add(name: str, cluster: Path, model: str, tokens: int, batch: int, *more: str) -> None:
        found[name] = ["--cluster", str(cluster), "--model", model, "--seq-length", str(tokens)]
        found[name] += ["--global-batch-size", str(batch), *more]

    for name, (model, tokens, batch) in PAPERS.items():
        add(name, CLUSTERS / "papers" / f"{name}.yaml", model, tokens, batch)
    for name in ("hexiscale_1", "hexiscale_case", "sailor_32_96"):
        model, tokens, batch = PAPERS[name]
        add(f"{name}, offload", CLUSTERS / "papers" / f"{name}.yaml", model, tokens, batch, "--offload", "always")
    add("selene_64, fp32", CLUSTERS / "papers" / "selene_64.yaml", "llama2-7b", 2048, 256, "--dtype", "fp32")
    for name in ("testbed", "testbed_context", "testbed_vendors", "two_nodes", "demo"):
        add(name, CLUSTERS / f"{name}.yaml", "tiny", 256, 16, "--dtype", "fp32")
    for name, tokens in (("testbed_context", 2048), ("two_nodes", 1024)):
        add(f"{name}, context", CLUSTERS / f"{name}.yaml", "tiny", tokens, 2, "--dtype", "fp32", "--context", "always")
    add("two_nodes, one lost", CLUSTERS / "two_nodes.yaml", "tiny", 256, 16, "--dtype", "fp32", "--without", "slow")
    for seed in range(24):
        rng = random.Random(seed)
        path = folder / f"random-{seed}.json"
        path.write_text(json.dumps(random_cluster(rng)))
        model = rng.choice(["llama2-7b", "llama2-13b", "llama3-8b"])
        add(f"random {seed}", path, model, rng.choice([2048, 4096]), rng.choice([32, 64, 96]))
    for seed in range(6):
        rng = random.Random(1000 + seed)
        path = folder / f"long-{seed}.json"
        path.write_text(json.dumps(random_cluster(rng)))
        add(f"long {seed}", path, "llama3-8b", rng.choice([65536, 131072]), rng.choice([2, 4]), "--context", "always")
    for seed in range(4):
        rng = random.Random(seed)
        path = folder / f"more-{seed}.json"
        path.write_text(json.dumps(random_cluster(rng)))
        more = ("--add", "1xH100-SXM") if seed % 2 else ("--without", "n0")
        add(f"random {seed}, {' '.join(more)}", path, "llama2-7b", 4096, 64, *more)
    for name, words in _small(folder).items():
        found[name] = words
    return found


EXPERTS: dict[str, Any] = {  # a mixture of experts in the keys of transformers
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TWO = (("H100-SXM", 2, 4), ("L40S", 2, 4))  # (chip, nodes, chips of each)
TINY = (("A100-80-SXM", 1, 2), ("L40S", 1, 2))
PAIR = (("A100-80-SXM", 1, 2), ("L40S", 1, 1))
VENDORS = (("A100-80-SXM", 1, 4), ("MI250X", 1, 4))
PLAIN = ("--fp8-recipe", "tensorwise")
KINDS = tuple((chip, 1, 2) for chip in CHIPS)


def _small(folder: Path) -> dict[str, list[str]]:
    """Words for ``plan`` by name."""
    model = folder / "experts" / "config.json"
    model.parent.mkdir(exist_ok=True)
    model.write_text(json.dumps(EXPERTS))
    found: dict[str, list[str]] = {}

    def add(name: str, nodes: tuple[tuple[str, int, int], ...], speed: int, model: str, tokens: int, batch: int,
            *more: str) -> None:  # fmt: skip
        path = folder / f"small-{len(found)}.json"
        rows = [
            {"name": f"n{i}", "chip": chip, "count": count, "chips_per_node": size}
            for i, (chip, count, size) in enumerate(nodes)
        ]
        link = {"bandwidth": f"{speed} GB/s", "latency": "15 us"}
        path.write_text(json.dumps({"nodes": rows, "links": {"inter_node": link}}))
        found[name] = ["--cluster", str(path), "--model", model, "--seq-length", str(tokens)]
        found[name] += ["--global-batch-size", str(batch), *more]

    moe = str(model.parent)
    add("fp8, one type", (("H100-SXM", 1, 4),), 50, "llama2-7b", 2048, 16, "--fp8-format", "hybrid", *PLAIN)
    add("fp8 of some chips", TWO, 50, "llama2-7b", 2048, 32, "--fp8-format", "hybrid", *PLAIN)
    add("fp8, block by block", TWO, 12, "llama2-7b", 2048, 32, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
    add("adapters", TINY, 12, "llama2-7b", 2048, 16, "--lora-rank", "16")
    add("adapters, int8 base", TINY, 12, "llama2-13b", 2048, 16, "--lora-rank", "8", "--lora-base-dtype", "int8")
    add("adapters, two nodes of each", TWO, 3, "llama2-7b", 2048, 32, "--lora-rank", "16")
    add("fast links, one sequence", TINY, 200, "llama2-7b", 2048, 1)
    add("fast links, two sequences", TINY, 200, "llama2-7b", 1024, 2)
    add("offload of one type", (("L40S", 1, 4), ("RTX4090", 1, 4)), 12, "llama2-7b", 2048, 16)
    add("offload of all", (("RTX4090", 1, 4),), 12, "llama2-7b", 1024, 8)
    add("METIS, eight kinds", KINDS, 12, "llama2-7b", 2048, 64)
    add("METIS, eight kinds, slow links", KINDS, 3, "llama2-7b", 2048, 64)
    add("one type alone, slow links", (("H100-SXM", 1, 4), ("V100-32-SXM2", 1, 4)), 1, "llama2-7b", 2048, 16)
    add("one type alone, slow chips", (("H100-SXM", 1, 2), ("RTX4090", 1, 2)), 1, "gpt2", 1024, 32)
    add("two vendors", VENDORS, 12, "llama2-7b", 2048, 16)
    add("two vendors, slow links", VENDORS, 3, "llama2-7b", 2048, 32)
    for name, nodes in (("equal", PAIR[:1]), ("unlike", PAIR)):
        add(f"experts, {name} chips", nodes, 12, moe, 1024, 4)
        add(f"experts, {name} chips, popular ones", nodes, 12, moe, 1024, 4, "--routing-stats", _popular(folder))
    add("experts, slow links", PAIR, 1, moe, 1024, 4)
    add("experts, two nodes of each", (("H100-SXM", 2, 1), ("L40S", 2, 1)), 12, moe, 1024, 4)
    return found


def _popular(folder: Path) -> str:
    """A file of --routing-stats of this model in which some experts have more tokens than others."""
    from hetero_megatron.plans.routing import VERSION, model_hash
    from hetero_megatron.spec import load_model

    counts = [450, 250, 200, 100]  # of 500 tokens
    layers = {str(layer): counts for layer in range(EXPERTS["num_hidden_layers"])}
    path, known = folder / "routing.json", model_hash(load_model(str(folder / "experts")))
    path.write_text(json.dumps({"version": VERSION, "model_hash": known, "tokens": 500, "layers": layers}))
    return str(path)


def random_cluster(rng: random.Random) -> dict[str, Any]:
    """2 to 4 types of chips in nodes of 1 to 8, of three speeds of network."""
    nodes = [
        {"name": f"n{i}", "chip": chip, "count": rng.randint(1, 3), "chips_per_node": rng.choice([1, 2, 4, 8])}
        for i, chip in enumerate(rng.sample(CHIPS, rng.randint(2, 4)))
    ]
    link = {"bandwidth": f"{rng.choice([3, 12, 50])} GB/s", "latency": "15 us"}
    return {"nodes": nodes, "links": {"inter_node": link}}


def plan(words: list[str]) -> dict[str, Any]:
    """What the command found, or why it found nothing."""
    from hetero_megatron.cli.main import main

    out, err, cpu = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *words, "--json", "--no-baselines", "--quiet"])
    cpu = time.process_time() - cpu
    if code:
        return {"refused": err.getvalue().strip()[:200], "cpu_seconds": round(cpu, 2)}
    found = json.loads(out.getvalue())
    return {k: found[k] for k in ("step_seconds", "fingerprint")} | {"cpu_seconds": round(cpu, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--record", type=Path, metavar="FILE")
    which.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    args = parser.parse_args()
    before: dict[str, Any] = json.loads(args.compare.read_text()) if args.compare else {}
    found, slower = dict[str, Any](), list[str]()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for name, words in cases(Path(folder)).items():
            if args.only not in name:
                continue
            one, was = found.setdefault(name, plan(words)), before.get(name, {})
            now, then = (side.get("step_seconds", math.inf) for side in (one, was))
            if was and now > (1 + LOSS) * then:
                slower.append(name)
            seconds = f"{now:.5g} s" if "step_seconds" in one else "refused"
            line = f"{name:<36}{seconds:>14}{one['cpu_seconds']:9.1f} CPU s"
            if was:
                same = one.get("fingerprint") == was.get("fingerprint")
                line += f"{now / then if math.isfinite(then) else 1:9.4f}  {'the same' if same else 'another'} plan"
            print(line, flush=True)
    if args.record:
        args.record.write_text(json.dumps(found, indent=1) + "\n")
    if slower:
        print(f"slower by more than {LOSS:.1%}: {', '.join(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
