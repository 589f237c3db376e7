"""``hetero-megatron completion bash | zsh | fish``: prints a script that completes commands, flags and file names."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress

from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.cli.main import COMMANDS, load_command
from hetero_megatron.errors import UserError

SHELLS = ("bash", "zsh", "fish")
USAGE = """\
usage: hetero-megatron completion bash | zsh | fish

  prints a script that completes commands, their flags and file names:
  bash, zsh   eval "$(hetero-megatron completion bash)" in ~/.bashrc (or zsh, in ~/.zshrc after compinit)
  fish        hetero-megatron completion fish > ~/.config/fish/completions/hetero-megatron.fish"""
_BASH = """\
_hetero_megatron() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    if [ "$COMP_CWORD" -gt 2 ] && [[ "$word" != -* ]]; then words=""; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _hetero_megatron hetero-megatron"""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise UserError("no such shell", field="completion", value=" ".join(argv), accepted=" | ".join(SHELLS))
    words = {name: (*command.parts, *flags_of(name)) for name, command in COMMANDS.items()}
    print(_fish(words) if argv[0] == "fish" else _bash(words, argv[0] == "zsh"))
    return 0


def flags_of(command: str) -> list[str]:
    """Flags that the help of a command names; of those with Megatron's flags, all of the table."""
    if command in ("pretrain", "finetune"):
        return [flag.name for flag in ALL if flag.status == "supported"]
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        load_command(command)(["--help"])
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", out.getvalue())))


def _bash(words: dict[str, tuple[str, ...]], zsh: bool) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(flags)}" ;;' for name, flags in words.items())
    script = _BASH.format(commands=" ".join(words), cases=cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if zsh else script


def _fish(words: dict[str, tuple[str, ...]]) -> str:
    lines = []
    for name, flags in words.items():
        lines.append(f"complete -c hetero-megatron -n __fish_use_subcommand -xa {name} -d '{COMMANDS[name].does}'")
        for word in flags:
            argument = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c hetero-megatron -n '__fish_seen_subcommand_from {name}' {argument}")
    return "\n".join(lines)
