"""When Triton interprets its kernels, who says so, and which arguments do not compile a kernel anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from hetero_megatron.ops import Signature
from hetero_megatron.platform.plugins import load_plugins
from tests.support.paths import ROOT
from tests.support.selection import quick


def python(program: str, value: str | None) -> str:
    """What ``program`` prints where TRITON_INTERPRET is ``value``."""
    where = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    where["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "plugins"))
    if value is not None:
        where["TRITON_INTERPRET"] = value
    return subprocess.run(
        [sys.executable, "-c", program], env=where, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("value", quick([None, "1", "true", "2"], [None]))
def test_plugin_and_package_agree_on_the_interpreter(value: str | None) -> None:
    plugin, package = python(
        "import hetero_plugins.triton, sys\nassert 'triton' not in sys.modules\nimport hetero_kernels\n"
        "print(hetero_plugins.triton.INTERPRETED, hetero_kernels.INTERPRETED)", value,
    ).split()  # fmt: skip
    assert plugin == package


def test_an_accelerator_is_not_served_by_the_interpreter() -> None:
    """The variable is set for all tests (conftest.py)."""
    kernel = load_plugins().registry.kernel("rms_norm", "triton")
    assert kernel.reasons(Signature("rms_norm", "cpu", torch.float32)) == []
    (reason,) = kernel.reasons(Signature("rms_norm", "cuda", torch.float32))
    assert "TRITON_INTERPRET" in reason


DROPPED = ["drop_key", "drop_sample", "drop_head", "drop_q", "drop_k"]  # where dropout is drawn


@pytest.mark.slow
def test_arguments_that_vary_within_a_run_are_not_compiled_in() -> None:
    program = """
import json
from hetero_kernels.adamw import _adamw
from hetero_kernels.attention_backward import attention_backward_kv, attention_backward_q
from hetero_kernels.attention_forward import attention_forward
from hetero_kernels.cross_entropy import _ce_bwd, _ce_fwd
from hetero_kernels.l2norm import _squares
from hetero_kernels.softmax import _softmax_fwd
kernels = (attention_forward, attention_backward_kv, attention_backward_q, _ce_fwd, _ce_bwd, _softmax_fwd, _adamw,
           _squares)
print(json.dumps({k.fn.__name__: [p.name for p in k.params if p.do_not_specialize] for k in kernels}))
"""
    assert json.loads(python(program, None)) == {
        "attention_forward": ["first_program", "offset", "q_blocks", *DROPPED],
        "attention_backward_kv": ["first_program", "offset", "k_blocks", *DROPPED],
        "attention_backward_q": ["first_program", "offset", "q_blocks", *DROPPED],
        "_ce_fwd": ["start"], "_ce_bwd": ["start"], "_softmax_fwd": ["diagonal"],
        "_adamw": ["first_chunk"], "_squares": ["first_chunk"],
    }  # fmt: skip
