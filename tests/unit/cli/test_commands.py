"""One entry for all commands: help with an example, shell completion, ``python -m hetero_megatron``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hetero_megatron.cli.completion import flags_of
from hetero_megatron.cli.main import COMMANDS, GROUPS, main
from tests.support.paths import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_is_short_and_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: hetero-megatron {name}")
    assert f"example:\n  {COMMANDS[name].example[:20]}" in text
    assert len(text.splitlines()) <= 90 and max(map(len, text.splitlines())) <= 120


def test_help_names_all_commands_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS) and all(f"\n{group}:" in text for group in GROUPS)


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hetero_megatron"]
    cases = {"--version": 0, "pretrain --model": 2, "pretrian": 2, "completion tcsh": 2}
    for words, code in cases.items():
        done = subprocess.run([*command, *words.split()], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert "did you mean" in subprocess.run([*command, "pretrian"], capture_output=True, text=True, cwd=ROOT).stderr


def completions(script: str, line: str) -> list[str]:
    words = line.split(" ")
    ask = f"COMP_WORDS=({line or ''}); COMP_CWORD={len(words) - 1}; _hetero_megatron; printf '%s\\n' ${{COMPREPLY[@]}}"
    if words[-1] == "":
        ask = ask.replace(f"({line})", f"({line}'')")
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_parts_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completions(script, "hetero-megatron pre") == ["pretrain", "predict", "preprocess"]
    assert set(completions(script, "hetero-megatron ")) == COMMANDS.keys()
    assert completions(script, "hetero-megatron plugins n") == ["new"]
    assert completions(script, "hetero-megatron plan --model tiny --clus") == ["--cluster"]
    assert "--tensor-model-parallel-size" in completions(script, "hetero-megatron pretrain --tensor")
    assert completions(script, "hetero-megatron plan --out runs") == []  # file names, by the shell


def test_flags_come_from_help() -> None:
    assert {"--input", "--workers"} <= set(flags_of("preprocess")) and "--dtype" in flags_of("convert")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_accepted_by_their_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", "/dev/stdin"], input=script, text=True, check=True, env=os.environ)


def test_a_reader_that_has_enough_is_no_error() -> None:
    """``hetero-megatron … | head``: no traceback, and the code of a program that the closed pipe ended."""
    command = [sys.executable, "-c", "import sys; from hetero_megatron.cli.start import console; sys.exit(console())"]
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*command, "plan", "--help"], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")
