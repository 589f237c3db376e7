"""The console line: a short one, and Megatron's, with tokens/s, MFU and time left. Scripts grep the latter's fields, so
their names and order stay."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field

COLUMNS = 120  # of a short line, at most


@dataclass(frozen=True)
class ConsoleLine:
    """What a line says. ``None`` leaves a field out.

    Attributes:
        seconds: per iteration, averaged since the last line.
        tflops: model TFLOP/s per chip; mfu: its share of the chip's peak (0 to 1).
        loss: mean since the last line.
        busiest: tokens of the busiest expert over the mean, in the layer where that is most; balance: losses that
            balance experts, by name.
        facts: what a loss beside another model's says besides itself, as means by name (of preference pairs TRL's).
    """

    iteration: int
    iterations: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    batch_size: int
    loss: float | None
    grad_norm: float | None
    loss_scale: float = 1.0
    tokens_per_second: float | None = None
    loss_tokens_per_second: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    skipped: int = 0
    nan: int = 0
    num_zeros: int | None = None
    params_norm: float | None = None
    eta_seconds: float | None = None
    busiest: float | None = None
    balance: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


def format_line(p: ConsoleLine, now: datetime.datetime | None = None) -> str:
    """One line, without a newline."""
    now = now or datetime.datetime.now()
    parts = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {p.iteration:8d}/{p.iterations:8d}",
        f"consumed samples: {p.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {p.seconds * 1000:.1f}",
    ]
    if p.tflops is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {p.tflops:.{1 if p.tflops >= 10 else 4}f}")
    if p.tokens_per_second is not None:
        parts.append(f"tokens/s: {p.tokens_per_second:.0f}")
    if p.loss_tokens_per_second is not None:
        parts.append(f"tokens/s in the loss: {p.loss_tokens_per_second:.0f}")
    if p.mfu is not None:
        parts.append(f"MFU: {100 * p.mfu:.1f}%")
    eta = p.eta_seconds if p.eta_seconds is not None else (p.iterations - p.iteration) * p.seconds
    parts.append(f"ETA: {format_duration(eta)}")
    parts.append(f"learning rate: {p.learning_rate:.6E}")
    parts.append(f"global batch size: {p.batch_size:5d}")
    if p.loss is not None:
        parts.append(f"lm loss: {p.loss:.6E}")
    parts += [f"{name}: {loss:.6E}" for name, loss in p.balance.items()]
    parts += [f"{name}: {mean:.6E}" for name, mean in p.facts.items()]
    parts.append(f"loss scale: {p.loss_scale:.1f}")
    if p.grad_norm is not None:
        parts.append(f"grad norm: {p.grad_norm:.3f}")
    if p.num_zeros is not None:
        parts.append(f"num zeros: {p.num_zeros}")
    if p.params_norm is not None:
        parts.append(f"params norm: {p.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {p.skipped:3d}")
    parts.append(f"number of nan iterations: {p.nan:3d}")
    if p.busiest is not None:
        parts.append(f"busiest expert over mean: {p.busiest:.2f}")
    return " | ".join(parts) + " |"


_SHORT_FACTS = {
    "rewards/accuracies": ("accuracy", ".0%"), "rewards/margins": ("margin", ".3f"),
    "distill/cross_entropy": ("cross-entropy", ".4f"), "distill/divergence": ("divergence", ".4f"),
}  # fmt: skip


def format_short(p: ConsoleLine) -> str:
    """At most ``COLUMNS`` characters: what matters most comes first, and what does not fit is left out."""
    eta = p.eta_seconds if p.eta_seconds is not None else (p.iterations - p.iteration) * p.seconds
    width = len(str(p.iterations))
    line = f" iteration {p.iteration:{width}d}/{p.iterations}"
    parts = [f"loss {p.loss:.4f}"] if p.loss is not None else []
    for name, (word, form) in _SHORT_FACTS.items():
        parts += [f"{word} {p.facts[name]:{form}}"] if name in p.facts else []
    parts += [f"skipped {p.skipped}"] if p.skipped else []
    parts += [f"not finite {p.nan}"] if p.nan else []
    parts.append(f"{p.seconds:.3g} s" if p.seconds >= 1 else f"{1000 * p.seconds:.3g} ms")
    counting = f" ({p.loss_tokens_per_second:,.0f} in the loss)" if p.loss_tokens_per_second is not None else ""
    parts += [f"{p.tokens_per_second:,.0f} tokens/s{counting}"] if p.tokens_per_second is not None else []
    parts += [f"MFU {100 * p.mfu:.1f}%"] if p.mfu is not None else []
    parts.append(f"ETA {format_duration(eta)}")
    parts += [f"experts {p.busiest:.2f}x"] if p.busiest is not None else []
    short = {"load_balancing_loss": "balance", "z_loss": "z"}
    parts += [f"{short.get(name, name.removesuffix(' loss'))} {loss:.3f}" for name, loss in p.balance.items()]
    parts += [f"grad norm {p.grad_norm:.3g}"] if p.grad_norm is not None else []
    parts.append(f"lr {p.learning_rate:.2e}")
    parts += [f"loss scale {p.loss_scale:g}"] if p.loss_scale != 1.0 else []
    parts += [f"{p.tflops:.3g} TFLOP/s/GPU"] if p.tflops is not None else []
    for part in parts:
        if len(line) + 3 + len(part) <= COLUMNS:
            line += f" | {part}"
    return line


def format_validation(
    iteration: int, loss: float, perplexity: float, name: str = "validation set",
    facts: Mapping[str, float] | None = None,
) -> str:  # fmt: skip
    """Megatron's line after an evaluation; of preference pairs with ``facts`` in the place of the perplexity."""
    line = f" validation loss at iteration {iteration} on {name} | lm loss value: {loss:.6E} | "
    more = facts or {"lm loss PPL": perplexity}
    return line + "".join(f"{key}: {value:.6E} | " for key, value in more.items())


def format_duration(seconds: float) -> str:
    """``42s``, ``3:05``, ``2:03:05`` or ``3d 02:03``."""
    whole = max(0, round(seconds))
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}:{m:02d}"
    if hours:
        return f"{hours}:{m:02d}:{s:02d}"
    return f"{m}:{s:02d}" if minutes else f"{s}s"
