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
    entries = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {p.iteration:8d}/{p.iterations:8d}",
        f"consumed samples: {p.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {p.seconds * 1000:.1f}",
    ]
    if p.tflops is not None:
        entries.append(f"throughput per GPU (TFLOP/s/GPU): {p.tflops:.{1 if p.tflops >= 10 else 4}f}")
    if p.tokens_per_second is not None:
        entries.append(f"tokens/s: {p.tokens_per_second:.0f}")
    if p.loss_tokens_per_second is not None:
        entries.append(f"tokens/s in the loss: {p.loss_tokens_per_second:.0f}")
    if p.mfu is not None:
        entries.append(f"MFU: {100 * p.mfu:.1f}%")
    eta = p.eta_seconds if p.eta_seconds is not None else (p.iterations - p.iteration) * p.seconds
    entries.append(f"ETA: {format_duration(eta)}")
    entries.append(f"learning rate: {p.learning_rate:.6E}")
    entries.append(f"global batch size: {p.batch_size:5d}")
    if p.loss is not None:
        entries.append(f"lm loss: {p.loss:.6E}")
    entries += [f"{name}: {loss:.6E}" for name, loss in p.balance.items()]
    entries += [f"{name}: {mean:.6E}" for name, mean in p.facts.items()]
    entries.append(f"loss scale: {p.loss_scale:.1f}")
    if p.grad_norm is not None:
        entries.append(f"grad norm: {p.grad_norm:.3f}")
    if p.num_zeros is not None:
        entries.append(f"num zeros: {p.num_zeros}")
    if p.params_norm is not None:
        entries.append(f"params norm: {p.params_norm:.3f}")
    entries.append(f"number of skipped iterations: {p.skipped:3d}")
    entries.append(f"number of nan iterations: {p.nan:3d}")
    if p.busiest is not None:
        entries.append(f"busiest expert over mean: {p.busiest:.2f}")
    return " | ".join(entries) + " |"


_SHORT_FACTS = {
    "rewards/accuracies": ("accuracy", ".0%"), "rewards/margins": ("margin", ".3f"),
    "reward": ("reward", ".3f"), "completions/mean_length": ("answers of", ".1f"), "kl": ("KL", ".4f"),
    "distill/cross_entropy": ("cross-entropy", ".4f"), "distill/divergence": ("divergence", ".4f"),
}  # fmt: skip


def format_short(p: ConsoleLine) -> str:
    """At most ``COLUMNS`` characters: what matters most comes first, and what does not fit is left out."""
    eta = p.eta_seconds if p.eta_seconds is not None else (p.iterations - p.iteration) * p.seconds
    width = len(str(p.iterations))
    line = f" iteration {p.iteration:{width}d}/{p.iterations}"
    entries = [f"loss {p.loss:.4f}"] if p.loss is not None else []
    for name, (word, form) in _SHORT_FACTS.items():
        entries += [f"{word} {p.facts[name]:{form}}"] if name in p.facts else []
    entries += [f"skipped {p.skipped}"] if p.skipped else []
    entries += [f"not finite {p.nan}"] if p.nan else []
    entries.append(f"{p.seconds:.3g} s" if p.seconds >= 1 else f"{1000 * p.seconds:.3g} ms")
    counting = f" ({p.loss_tokens_per_second:,.0f} in the loss)" if p.loss_tokens_per_second is not None else ""
    entries += [f"{p.tokens_per_second:,.0f} tokens/s{counting}"] if p.tokens_per_second is not None else []
    entries += [f"MFU {100 * p.mfu:.1f}%"] if p.mfu is not None else []
    entries.append(f"ETA {format_duration(eta)}")
    entries += [f"experts {p.busiest:.2f}x"] if p.busiest is not None else []
    short_names = {"load_balancing_loss": "balance", "z_loss": "z"}
    entries += [f"{short_names.get(name, name.removesuffix(' loss'))} {loss:.3f}" for name, loss in p.balance.items()]
    entries += [f"grad norm {p.grad_norm:.3g}"] if p.grad_norm is not None else []
    entries.append(f"lr {p.learning_rate:.2e}")
    entries += [f"loss scale {p.loss_scale:g}"] if p.loss_scale != 1.0 else []
    entries += [f"{p.tflops:.3g} TFLOP/s/GPU"] if p.tflops is not None else []
    for entry in entries:
        if len(line) + 3 + len(entry) <= COLUMNS:
            line += f" | {entry}"
    return line


def format_validation(
    iteration: int, loss: float, perplexity: float, name: str = "validation set",
    facts: Mapping[str, float] | None = None,
) -> str:  # fmt: skip
    """Megatron's line after an evaluation; of preference pairs with ``facts`` in the place of the perplexity."""
    line = f" validation loss at iteration {iteration} on {name} | lm loss value: {loss:.6E} | "
    measures = facts or {"lm loss PPL": perplexity}
    return line + "".join(f"{key}: {value:.6E} | " for key, value in measures.items())


def format_duration(seconds: float) -> str:
    """``42s``, ``3:05``, ``2:03:05`` or ``3d 02:03``."""
    rounded = max(0, round(seconds))
    minutes, s = divmod(rounded, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02d}:{m:02d}"
    if hours:
        return f"{hours}:{m:02d}:{s:02d}"
    return f"{m}:{s:02d}" if minutes else f"{s}s"
