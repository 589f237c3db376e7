"""``hetero-megatron finetune``: as ``pretrain``, on conversations (``--sft``) or pairs (``--preference``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hetero_megatron.cli import pretrain


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; an error is one line on standard error."""
    words = list(argv) if "--sft" in argv else ["--sft", *argv]
    return pretrain.main(words, environment, "finetune")
