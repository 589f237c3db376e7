"""What ends a rank is one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_megatron.cli.rank_errors import USER_ERROR, end_rank
from hetero_megatron.environment.launcher import LauncherEnvironment


def test_a_compiler_without_code_for_the_device_is_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(module: Any, inputs: Any) -> Any:
        assert inputs is None, "no code for such devices"

    try:
        torch.compile(lambda x: x + 1, backend=fails)(torch.zeros(2))
    except Exception as error:
        assert end_rank(error, LauncherEnvironment(), {}) == USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("error: --compile: torch's compiler fails")
    assert "no code for such devices" in said and "Accepted: to leave it out" in said
