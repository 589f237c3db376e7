"""Calibration on the testbed: how far repeated calibrations agree, rate by rate, and how long one takes.

    python benchmarks/bench_calibration.py [--chips clock soft] [--repeats 3] [--steps N]

Each repeat is a testbed of its own, on which ``hetero-megatron calibrate`` runs (micro-batch sizes 1 and 2; sequence
length and, without ``--steps``, measured steps are ``bench_testbed.py``'s for such chips). Spread: (largest - smallest)
/ median of one rate over the repeats. Layers, embedding, head, attention and the optimizer are what a chip does (goal:
3 % under ``clock``; none under ``soft``); links, what TP groups wait in their exchanges and host overheads are real in
either case and are listed for information, links as the seconds of a message.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_testbed import MODEL, MODES, PLANS, cluster_of
from benchmarks.common import machine
from benchmarks.testbed_run import ROOT
from hetero_megatron.spec.flops import TP_COLLECTIVES

GOAL = 0.03  # of ``clock``
SECONDS_GOAL = 120
STAGES = ("layers", "embed", "head")
CHIP_RATES = (*STAGES, "optimizer", "attention")
BY_TP = (*STAGES, "waiting")
MODEL_CONFIG = {  # a Hugging Face config.json of the benchmark's model
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": MODEL["num_layers"],
    "hidden_size": MODEL["hidden_size"], "intermediate_size": MODEL["ffn_hidden_size"],
    "num_attention_heads": MODEL["num_heads"], "num_key_value_heads": MODEL["num_kv_heads"],
    "head_dim": MODEL["head_dim"], "vocab_size": MODEL["vocab_size"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": MODEL["max_position_embeddings"], "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def measure(name: str, chips: str, steps: int) -> tuple[dict[str, Any], float, str]:
    """(rates, seconds from the start of the ranks to their end, what the launcher and the clock said)."""
    length = MODES[chips]["seq_length"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "cluster.json").write_text(json.dumps(cluster_of(name, chips)))
        (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
        command = [sys.executable, "-m", "hetero_megatron.cli.main"]
        run = [*command, "testbed", "run", "--chips", chips, "--cluster", str(path / "cluster.json"), "--"]
        run += [*command, "calibrate", "--model", str(path / "config.json"), "--seq-length", str(length)]
        run += ["--attention-lengths", f"{length},{2 * length}", "--steps", str(steps)]
        run += ["--out", str(path / "out.json")]
        start = time.perf_counter()
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        seconds = time.perf_counter() - start
        return _read(path / "out.json"), seconds, done.stdout + done.stderr


def _read(file: Path) -> dict[str, Any]:
    from hetero_megatron.cluster import load_cluster

    return dict(load_cluster(str(file)).rates)


def flat(rates: dict[str, Any]) -> dict[str, dict[tuple[Any, ...], float]]:
    """By kind of rate, then by what it is the rate of. Rows end in (forward, backward) seconds, the optimizer's in
    seconds."""
    found: dict[str, dict[tuple[Any, ...], float]] = {}
    for chip, dtypes in rates["chips"].items():
        for kind, value in next(iter(dtypes.values())).items():
            if isinstance(value, dict):  # the spread inside one calibration
                continue
            if isinstance(value, float):
                found.setdefault(kind, {})[chip,] = value
                continue
            width = 1 if kind == "optimizer" else 2
            for row in value:
                into = found.setdefault(f"{kind}, TP {row[1]}" if kind in BY_TP else kind, {})
                for way, seconds in enumerate(row[-width:]):
                    into[(chip, *row[:-width], way)] = seconds
    for link in rates["links"]:
        ends = tuple(link.get(k) for k in ("within", "from", "to"))
        for size in (64, 1024):  # alpha alone is a small difference of large numbers
            seconds = link["alpha"] + link["message_seconds"] + link["beta"] * (size << 10)
            found.setdefault(f"{size} KiB message", {})[ends] = seconds
    return found


def spreads(repeats: list[dict[str, Any]]) -> dict[str, tuple[int, float, float, str]]:
    """By kind: (how many rates, median spread, largest spread, of which rate). Embedding and head count against a
    layer's seconds where they are smaller than that: they are differences of stages that hold layers too. So do visits
    of a ring's block against attention, and what TP groups wait in a layer's exchanges."""
    every = [flat(rates) for rates in repeats]
    found = {}
    for kind, first in every[0].items():
        widths: dict[tuple[Any, ...], float] = {}
        for key in first:
            values = [one[kind][key] for one in every]
            base = median(values)
            table, _, degree = kind.partition(",")
            if table in ("embed", "head", "waiting"):
                layer = median(one[f"layers,{degree}"][key] for one in every)
                base = layer / TP_COLLECTIVES if table == "waiting" else max(base, layer)
            if kind == "visits":
                base = median(one["attention"][key] for one in every)
            widths[key] = (max(values) - min(values)) / base if base else 0.0
        worst = max(widths, key=lambda key: widths[key])
        found[kind] = (len(widths), median(widths.values()), widths[worst], " ".join(map(str, worst)))
    return found


def _met(value: float, goal: float) -> str:
    return "met" if value <= goal else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", default=["clock", "soft"], choices=("clock", "soft"))
    parser.add_argument("--only", nargs="*", default=["3:1, 2+2"], choices=list(PLANS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of calibrate, whose default is 1")
    parser.add_argument("--out", help="write all rates as JSON")
    args = parser.parse_args()
    print(f"{machine()}; {args.repeats} repeats")
    print("\n| cluster | chips | kind of rate | rates | median spread | largest spread | of |\n" + 7 * "|---" + "|")
    closing, everything = [], {}
    for name in args.only:
        for chips in args.chips:
            steps = args.steps or MODES[chips]["calibration_steps"]
            runs = [measure(name, chips, steps) for _ in range(args.repeats)]
            found = spreads([rates for rates, _, _ in runs])
            everything[f"{name}, {chips}"] = [rates for rates, _, _ in runs]
            if args.out:
                Path(args.out).write_text(json.dumps(everything, indent=1))
            for kind, (count, middle, most, where) in found.items():
                print(f"| {name} | {chips} | {kind} | {count} | {middle:.2%} | {most:.2%} | {where} |", flush=True)
            worst = max(most for kind, (_, _, most, _) in found.items() if kind.startswith(CHIP_RATES))
            longest = max(seconds for _, seconds, _ in runs)
            disturbed = sum("DISTURBED" in said for _, _, said in runs)
            invalid = sum("INVALID" in said for _, _, said in runs)
            goal = f", goal {GOAL:.0%}: {_met(worst, GOAL)}" if chips == "clock" else ""
            text = f"{name}, {chips}, {steps} steps: largest spread of a chip's rate {worst:.2%}{goal}; "
            text += f"{longest:.0f} s with start-up, "
            text += f"goal {SECONDS_GOAL} s: {_met(longest, SECONDS_GOAL)}; "
            text += f"disturbed {disturbed}, invalid {invalid} of {len(runs)}"
            closing.append(text)
    print("\n" + "\n".join(closing))


if __name__ == "__main__":
    main()
