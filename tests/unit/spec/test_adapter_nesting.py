"""Patterns of adapters' places that no machine can read: refused in one line, like those that take too long."""

from __future__ import annotations

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.spec.adapter_places import matches


@pytest.mark.parametrize("pattern", ["(" * 5000 + "q" + ")" * 5000, "(" * 5000, "x{9999999999999}", "(?P<a>q)(?P=b)"])
def test_a_pattern_that_cannot_be_compiled_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="nested too deep|no regular expression"):
        matches(pattern, "model.layers.0.self_attn.q_proj", "--lora-targets")
