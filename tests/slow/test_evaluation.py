"""lm-eval on what a run exported, as docs/generate.md says, where it is installed (``pip install lm_eval``)."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT

TEXTS = ROOT / "examples" / "evaluation" / "text.jsonl"
CHOICES = ROOT / "examples" / "evaluation" / "choice.jsonl"


def logarithm(model: torch.nn.Module, ids: list[int], first: int) -> float:
    """Natural logarithm of the probability of the tokens from place ``first`` on, after those before."""
    scores = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return sum(float(scores[i - 1, ids[i]]) for i in range(first, len(ids)))


@pytest.mark.slow
def test_the_recipe_gives_what_the_weights_give(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    page = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
    recipe = re.findall(r"```bash\n(.*?)```", page.partition("\n## Evaluate\n")[2], re.DOTALL)[0]
    commands = recipe.replace("runs/generate", str(tmp_path)).replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    subprocess.run([sys.executable, "examples/small_chat_model.py", str(tmp_path)], cwd=ROOT, check=True)
    subprocess.run(["bash", "-e", "-c", commands], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)

    results = json.loads(next((tmp_path / "evaluation").rglob("results_*.json")).read_text())["results"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    with torch.no_grad():
        texts = [json.loads(line)["text"] for line in TEXTS.read_text().splitlines()]
        nats = sum(logarithm(model, [tokenizer.eos_token_id, *tokenizer.encode(text)], 1) for text in texts)
        right = 0
        for question in map(json.loads, CHOICES.read_text().splitlines()):
            context = tokenizer.encode(question["question"])
            rows = [tokenizer.encode(f"{question['question']} {choice}") for choice in question["choices"]]
            scores = [logarithm(model, row, len(context)) for row in rows]
            right += scores.index(max(scores)) == question["answer"]
    bits = -nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert results["here_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-3)
    assert results["here_choice"]["acc,none"] == right / len(CHOICES.read_text().splitlines())
