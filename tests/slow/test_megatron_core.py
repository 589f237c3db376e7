"""Checkpoints that megatron-core writes become models with its logits. Skipped where it is not installed
(``pip install --no-deps megatron-core``; it needs no GPU for this)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hetero_megatron.cli.main import main
from tests.support import megatron_core_job
from tests.support.programs import ROOT

pytestmark = pytest.mark.slow


def core(ranks: int, *words: object) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, str(Path(megatron_core_job.__file__)), *map(str, words)], cwd=ROOT, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "words"),
    [(1, 1, 0, ()), (2, 2, 0, ()), (1, 1, 2, ()), (1, 2, 2, ()), (2, 1, 1, ("latent",)), (1, 2, 2, ("latent",))],
)
def test_logits_are_those_of_megatron_core(tp: int, pp: int, ep: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """``ep`` > 0: a mixture of experts; ``latent``: of DeepSeek-V3, with its attention."""
    pytest.importorskip("megatron.core")
    both = {form: tmp_path / form for form in ("torch_dist", "torch")}
    for form, folder in both.items():  # the same seeds: the same weights
        core(tp * pp * max(ep, 1), "save", tp, pp, ep, form, folder, *words)
    core(1, "logits", 1, 1, min(ep, 1), "torch_dist", both["torch_dist"], *words)
    want = torch.load(both["torch_dist"] / "logits.pt", weights_only=True)
    for form, folder in both.items():
        native, back = str(tmp_path / f"{form}-native"), str(tmp_path / f"{form}-hf")
        assert main(["convert", str(folder), native]) == 0 and main(["convert", native, back]) == 0
        tokens = torch.arange(24).view(2, 12) * 7 % megatron_core_job.VOCABULARY
        got = AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
