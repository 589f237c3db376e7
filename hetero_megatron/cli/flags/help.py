"""The table of flags as help and as docs/flags.md: ``python -m hetero_megatron.cli.flags --markdown``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from hetero_megatron.cli.flags.flag import NOTICE, REFUSED, SUPPORTED, Flag
from hetero_megatron.cli.flags.table import ALL, GROUPS

_INTRO = """\
# Flags of `hetero-megatron pretrain` (`pretrain_gpt.py`)

Written by `python -m hetero_megatron.cli.flags --markdown` from `hetero_megatron/cli/flags/table/`; do not edit.

Names are Megatron's unless they stand under *Plan and run* or *Fine-tuning*. A flag is **supported**; or accepted
with a **notice**, because it cannot change results or what has to fit into memory; or **refused**. Unknown flags are
refused, and so are abbreviations. Of a flag that stands twice the last one counts.
"""


def markdown() -> str:
    """docs/flags.md."""
    lines = [_INTRO, "## Defaults that differ from Megatron's", "", "| flag | difference |", "|---|---|"]
    lines += [f"| `{flag.name}` | {flag.differs} |" for flag in ALL if flag.differs]
    for group, flags in GROUPS.items():
        lines += ["", f"## {group}", "", "| flag | values | default | what it does |", "|---|---|---|---|"]
        lines += [_row(flag) for flag in flags]
    return "\n".join(lines) + "\n"


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in (flag.name, *flag.aliases))
    text = flag.help
    if flag.status == NOTICE:
        text = f"*no effect*: {flag.help}"
    elif flag.status == REFUSED:
        text = f"**refused**: {flag.help}. Instead: {flag.remedy}"
    elif flag.remedy:
        accepted = ", ".join(str(choice) for choice in flag.choices)
        text = f"only {accepted}; other values are **refused**: {flag.help}"
    needed = [" or ".join(need.any_of) for need in flag.needs]
    text += f" (has no effect without {', and '.join(needed)})" if needed else ""
    cells = (names, _values(flag), _default(flag), text)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(flag: Flag) -> str:
    if flag.choices and not flag.remedy:
        return ", ".join(f"`{choice}`" for choice in flag.choices)
    if flag.nargs == 0:
        return "switch"
    name = {int: "integer", float: "number"}.get(flag.type, "word")  # type: ignore[call-overload]
    count_text = {1: "", "+": " (one or more)", "*": " (any number)"}.get(flag.nargs, f" x {flag.nargs}")
    return f"{name}{count_text}"


def _default(flag: Flag) -> str:
    if flag.status != "supported" or flag.default is None:
        return ""
    return "off" if flag.default is False else f"`{flag.default:g}`" if isinstance(flag.default, float) else (
        f"`{flag.default}`"
    )  # fmt: skip


# What `--help` shows; `--help-all` shows the rest.
_COMMON = {
    "--plan", "--auto-plan", "--cluster", "--dry-run", "--as-rank", "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size", "--context-parallel-size", "--model", "--load-hf", "--seq-length", "--bf16",
    "--data-path", "--split", "--mock-data", "--tokenizer-model", "--reset-attention-mask", "--micro-batch-size",
    "--global-batch-size", "--train-iters", "--lr", "--min-lr", "--lr-warmup-iters", "--clip-grad", "--seed",
    "--eval-interval", "--eval-iters", "--save", "--load", "--save-interval", "--save-hf", "--log-interval",
    "--tensorboard-dir",
}
# Of those of fine-tuning.
_RARELY = {
    "--sft", "--lora-targets", "--lora-layers", "--lora-sites", "--use-rslora", "--shuffle-buffer",
    "--overlong-samples", "--dpo-beta", "--dpo-label-smoothing", "--dpo-average-log-probs", "--dpo-sft-weight",
    "--simpo-gamma", "--reference-hf", "--reference-logps", "--kto-desirable-weight", "--kto-undesirable-weight",
    "--lora-dropout", "--reward-timeout", "--grpo-prompts-per-step", "--grpo-iterations", "--grpo-clamp-eps-lower",
    "--grpo-clamp-eps-upper", "--grpo-loss-type", "--grpo-scale-rewards", "--rollout-batch-size", "--grpo-plain-kl",
    "--grpo-group-size", "--grpo-kl-beta", "--max-new-tokens", "--generator-sync-every", "--generator-ahead",
}


def help_text(command: str = "pretrain", everything: bool = True) -> str:
    """What ``--help-all`` prints, the supported flags; or ``--help``, those that most runs have."""
    lines = [f"usage: hetero-megatron {command} --plan FILE | --auto-plan --cluster FILE | Megatron's parallel flags",
             "                                --model M, data, training ... (--nproc-per-node N: ranks on this host)",
             f"       hetero-megatron {command} --help | --help-all | --version", ""]
    for group, flags in GROUPS.items():
        flags_shown = [flag for flag in flags if _in_help(flag) and (everything or _common(flag, command))]
        if flags_shown:
            lines.append(f"{group}:")
        for flag in flags_shown:
            default = _default(flag).replace("`", "")
            tail = f" [{default}]" if default and default != "off" else ""
            choices = f" ({' | '.join(map(str, flag.choices))})" if flag.choices else ""
            text = textwrap.wrap(f"{flag.summary or flag.help}{choices}{tail}", 64)
            name = f"  {flag.name}"
            first = [f"{name:<42} {text[0]}"] if len(name) <= 42 else [name, " " * 43 + text[0]]
            lines += first + [" " * 43 + line_after for line_after in text[1:]]
        if flags_shown:
            lines.append("")
    if not everything:
        return "\n".join(lines) + "--help-all lists all flags."
    accepted = sum(flag.status == NOTICE for flag in ALL)
    lines.append(f"{accepted} more of Megatron's flags are accepted without effect; docs/flags.md lists all of them.")
    return "\n".join(lines)


def _common(flag: Flag, command: str) -> bool:
    if flag in GROUPS["Fine-tuning"]:
        return command == "finetune" and flag.name not in _RARELY
    return flag.name in _COMMON


def _in_help(flag: Flag) -> bool:
    """Flags that do something; those with one accepted value do nothing."""
    return flag.status == SUPPORTED and (not flag.remedy or len(flag.choices) > 1) and not flag.says


def main(argv: Sequence[str]) -> int:
    if list(argv) == ["--markdown"]:
        print(markdown(), end="")
        return 0
    print(help_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
