"""Run N cases of the fuzzer: ``python -m tests.fuzz -n 4000 --seed 1``; exit code 1 if one ends badly."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.fuzz import cases, foreign, pieces, weights
from tests.fuzz.documents import LLAMA
from tests.fuzz.pool import ROOT, Pool
from tests.support.chat import TEMPLATES, chat_tokenizer

BAD = (cases.TRACEBACK, cases.WRONG, cases.HANG, cases.CRASH)
COLUMNS = (cases.ACCEPTED, cases.REFUSED, *BAD)


def main() -> int:
    args = _arguments()
    numbers = [(cases.kind_of(i), i) for i in range(args.n)]
    if args.case is not None:
        numbers = [(cases.kind_of(args.case), args.case)]
    numbers = [(kind, i) for kind, i in numbers if args.kinds is None or kind in args.kinds.split(",")]
    findings = Path(args.findings)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        bases, inputs = Path(place) / "bases", Path(place) / "inputs"
        make_bases(bases)
        counts: dict[str, Counter[str]] = {kind: Counter() for kind in cases.KINDS}
        seen = Counter[str]()
        pool = Pool(args.jobs, args.seed, bases, inputs, args.seconds, args.memory << 20)
        with contextlib.suppress(KeyboardInterrupt):  # the table is of what was run
            for kind, number, outcome in pool.run(numbers):
                counts[kind][outcome.result] += 1
                folder = inputs / f"{kind}-{number}"
                line = f"{kind}: {outcome.result}: {outcome.words.replace(str(folder), '')}"
                if outcome.result in BAD:
                    _keep(
                        findings,
                        folder,
                        f"seed{args.seed}-{kind}-{number}",
                        f"--seed {args.seed} --case {number}",
                        line,
                    )
                    seen[line] += 1
                if outcome.result in BAD or args.case is not None:
                    print(f"case {number}: {line}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
    _print(counts, seen)
    if seen:
        print(f"inputs of the failures, each with the command that repeats it: {findings}")
    return 1 if seen else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("-n", type=int, default=400, help="number of cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help=f"only these, separated by commas: {', '.join(cases.KINDS)}")
    parser.add_argument("--case", type=int, help="only this number, and print what it gives")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=120.0, help="of one case")
    parser.add_argument("--memory", type=int, default=3072, help="MiB of one process")
    parser.add_argument("--findings", default="runs/fuzz", help="where failing inputs are kept")
    return parser.parse_args()


def make_bases(bases: Path) -> None:
    """A run with a checkpoint and logs, and a checkpoint of the small model: what some kinds start from."""
    model = bases / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(LLAMA))
    chat_tokenizer(bases / "chat", TEMPLATES["chatml"])
    chat_tokenizer(bases / "pieces", pieces.TEMPLATE)
    from safetensors.torch import save_file

    save_file(weights.tensors(), model / "model.safetensors", {"format": "pt"})
    foreign.make_base(bases / "adapted")
    python = [sys.executable, "-m", "hetero_megatron.cli.main"]
    words = [
        "--mock-data",
        "--seq-length",
        "32",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "2",
        "--train-iters",
        "4",
        "--lr",
        "1e-3",
        "--log-interval",
        "1",
        "--num-layers",
        "2",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "4",
        "--vocab-size",
        "32",
    ]
    for command in (
        [*python, "convert", str(model), str(bases / "checkpoint")],
        [sys.executable, "pretrain_gpt.py", *words, "--save", str(bases / "run")],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"a valid input cannot be made: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _keep(findings: Path, folder: Path, name: str, case: str, line: str) -> None:
    target = findings / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    notes = [f"{sys.executable} -m tests.fuzz {case}", line]
    # Not copytree: what stands in place of a file may be a FIFO or a device.
    for path in sorted(folder.rglob("*")):
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 16 << 20
        if plain:
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        elif path.is_symlink() or not path.is_dir():
            notes.append(f"not kept, as it is no plain file or too large: {path.relative_to(folder)}")
    (target / "again.txt").write_text("\n".join(notes) + "\n")


def _print(counts: dict[str, Counter[str]], seen: Counter[str]) -> None:
    print(f"{'kind':<14}{'cases':>8}" + "".join(f"{name:>11}" for name in COLUMNS))
    rows = [*counts.items(), ("all", sum(counts.values(), Counter()))]
    for kind, found in rows:
        print(f"{kind:<14}{found.total():>8}" + "".join(f"{found[name]:>11}" for name in COLUMNS))
    for words, count in seen.most_common():
        print(f"  {count:>4} x {words}")


if __name__ == "__main__":
    sys.exit(main())
