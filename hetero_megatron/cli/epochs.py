"""``--epochs``: how long to train, counted by the data."""

from __future__ import annotations

import math

from hetero_megatron.cli.flags.parse import Arguments, flag_error
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.utils.text import plural


def take_epochs(
    args: Arguments, data: DataConfig | None, seq_length: int, global_batch_size: int, rows: int
) -> None:
    """Put the steps of ``--epochs`` in the place of ``--train-iters``, rounded up; packs of conversations are counted
    for that, so all of them are encoded (large data sets are cached, and encoded once).

    Args:
        rows: of the model's embedding.

    Raises:
        UserError: another length is given, or the data have no end that is known.
    """
    epochs = args["epochs"]
    if epochs is None:
        return
    for other in ("train_iters", "train_samples"):
        if args[other] is not None:
            raise flag_error(other, args[other], "two lengths: --epochs is one, too", "one of them")
    if data is None:  # a dry run
        return
    if data.reads_stream:
        raise flag_error("epochs", epochs, "a stream has no known length", "--train-iters or --train-samples")
    from hetero_megatron.data.chat.packed import PackedConversations

    found = build_datasets(data, seq_length, args["seed"], (1, 0, 0), rows, log=lambda _: None).train
    if not isinstance(found, PackedConversations):
        problem = "a blend of several data sets has no epochs: each has its own"
        raise flag_error("epochs", epochs, problem, "--train-iters or --train-samples, or one data set")
    steps = math.ceil(round(epochs * found.num_packs / global_batch_size, 6))
    args.values["train_iters"] = max(1, steps)
    args.notices.append(
        f"--epochs {epochs:g}: {plural(found.num_packs, 'sample')} each, {plural(args['train_iters'], 'step')}"
    )
