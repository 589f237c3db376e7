"""The state-space rule of Mamba-2, forward and backward, against transformers' own torch path
(``mamba2_chunk_scan``) with chunks of 64, 128 and 256 tokens, on one core; sides alternate."""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable
from functools import partial

SIZES = {  # rows, tokens, groups, heads, features of the state, of a head
    "one group of 8": (1, 1024, 1, 8, 128, 64), "8 groups of 2": (2, 512, 8, 16, 64, 64),
    "one group of 48": (1, 512, 1, 48, 128, 64),
}  # fmt: skip


def best(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least CPU seconds of each, in turns: others on the machine count less."""
    seconds = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    import torch
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    from hetero_megatron.ops import SPECS, torch_registry
    from hetero_megatron.ops.bind import bind

    torch.set_num_threads(1)
    rule = bind(SPECS["state_space_rule"], torch_registry().kernel("state_space_rule", "aten"))
    scan = inspect.unwrap(mamba2_chunk_scan)
    print(f"fp32, CPU time of one thread, least of {args.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    for name, (b, s, groups, heads, dk, dv) in SIZES.items():
        c, keys = (torch.randn(b, s, groups, dk, requires_grad=True) for _ in range(2))
        x, dt = torch.randn(b, s, heads, dv, requires_grad=True), torch.rand(b, s, heads, requires_grad=True)
        slopes = -torch.rand(heads)

        def theirs(chunk: int) -> None:
            scan(x, dt, slopes, keys, c, chunk_size=chunk).sum().backward()  # noqa: B023 (called at once)

        sides: dict[str, Callable[[], None]] = {
            "ours": lambda: rule(c, keys, x, slopes * dt, dt, None, None)[0].sum().backward(),  # noqa: B023
            **{f"theirs, {chunk}": partial(theirs, chunk) for chunk in (64, 128, 256)},
        }
        seconds = best(sides, args.rounds)
        ratios = ", ".join(
            f"{side} {took / seconds['ours']:.2f}x" for side, took in seconds.items() if side != "ours"
        )
        print(f"{name:<18} {b} x {s}: ours {seconds['ours'] * 1e3:.0f} ms; theirs over ours: {ratios}", flush=True)


if __name__ == "__main__":
    main()
