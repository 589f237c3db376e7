"""``hetero-megatron score``: as ``pretrain``, but it writes what the model says of the data, and trains nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hetero_megatron.cli import pretrain
from hetero_megatron.cli.log import say_error
from hetero_megatron.errors import UserError


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; an error is one line on standard error."""
    given = {word.partition("=")[0] for word in argv}
    if not given.isdisjoint({"-h", "--help", "--help-all", "--version", "--save-scores"}):
        return pretrain.main(argv, environment, "score")
    error = UserError("missing: the file that is written", field="--save-scores", accepted="--save-scores FILE")
    say_error(str(error), environment)
    return 2
