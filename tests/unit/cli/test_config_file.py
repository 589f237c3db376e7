"""--config FILE: flags by their names, with the line of each value in messages; the command line wins."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from hetero_megatron.cli import pretrain
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.flags.flag import SUPPORTED
from hetero_megatron.cli.flags.parse import parse, parse_all
from hetero_megatron.cli.flags.table import ALL
from hetero_megatron.errors import UserError

RUN = {"model": "tiny", "mock-data": True, "seq_length": 64, "micro-batch-size": 1, "train-iters": 3, "lr": 1e-3}


def file(tmp_path: Path, text: str, name: str = "run.yaml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_a_run_is_the_same_from_yaml_json_toml_and_words(tmp_path: Path) -> None:
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in RUN.items())
    assert tomllib.loads(toml) == RUN
    words = [w for key, value in RUN.items() for w in ("--" + key.replace("_", "-"), str(value)) if w != "True"]
    told = configure(words, {})
    for name, text in {"a.yaml": yaml.safe_dump(RUN), "a.json": json.dumps(RUN), "a.toml": toml}.items():
        assert configure(["--config", file(tmp_path, text, name)], {}) == told


def test_the_command_line_wins_and_what_counts_is_printed_as_a_file_that_gives_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file(tmp_path, yaml.safe_dump({**RUN, "bf16": False, "data_path": [0.3, "a", 0.7, "b"], "split": "$HOME"}))
    args = parse(["--train-iters", "7", "--config", name, "--split", "9,1,0"])
    assert (args["train_iters"], args["lr"], args["split"]) == (7, 1e-3, "9,1,0")
    assert args["data_path"] == ("0.3", "a", "0.7", "b") and not args.has("bf16") and not args.notices
    name = file(tmp_path, yaml.safe_dump({**RUN, "seed": 5}))
    assert pretrain.main(["--config", name, "--seed=6", "--write-config"], {}) == 0
    said = capsys.readouterr().out
    assert "seed: 6  # command line" in said and f"lr: 0.001  # {name}:1" in said and "# adam-beta1: 0.9" in said
    again = file(tmp_path, said, "again.yaml")
    assert configure(["--config", again], {}) == configure(["--config", name, "--seed", "6"], {})


def test_errors_name_file_and_line_all_in_one(tmp_path: Path) -> None:
    text = (
        "model: tiny\nmock_data: 1\nseq-length: [64]\nmicro_batch_size: 1\nmicro-batch-size: 2\ntrain-itres: 3\n"
        "lr: -1\ndata-path: ['--x']\nglobal-batch-size: 0\nconfig: other.yaml\nseed: {a: 1}\nsave: $A\nlog-interval:\n"
    )
    name = file(tmp_path, text)
    with pytest.raises(UserError) as caught:
        configure(["--config", name, "--dry-run"], {})
    told = str(caught.value)
    for line, words in {
        2: "mock_data = 1: is a switch", 3: "seq-length = [64]",
        5: "the file gives it twice", 6: "did you mean --train-iters?", 7: "--lr = -1: too small",
        8: "looks like a flag", 9: "--global-batch-size = 0: too small", 10: "a file names no other one",
        11: "seed = {'a': 1}", 13: "log-interval",
    }.items():  # fmt: skip
        assert f"{name}:{line}: " in told and words in told
    assert "missing" not in told and "\n" not in told
    late = file(tmp_path, yaml.safe_dump({**RUN, "global-batch-size": 3, "micro-batch-size": 2}))
    with pytest.raises(UserError, match=rf"{late}:1: --global-batch-size = 3"):
        configure(["--config", late], {})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("a.yaml", "", "the file is empty"), ("a.yaml", "- a", "a mapping was expected"),
     ("a.toml", "a = ", "is not TOML"), ("a.yaml", "lr: 1\nlr: 2", "written twice"),
     ("a.toml", "[model]\nlr = 1", "model"), ("a.json", "{", "a.json")],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, name: str, text: str, says: str) -> None:
    _, errors = parse_all(["--config", file(tmp_path, text, name)])
    assert len(errors) == 1 and says in str(errors[0]) and "\n" not in str(errors[0])
    _, [missing] = parse_all(["--config", str(tmp_path / "none")])
    assert "No such file" in str(missing)
    assert [str(e).split(":")[1] for e in parse_all(["--config"])[1]] == [" --config = "]


VALUES = [3, -1, 0.5, 1e308, "x", "", " ", "--x", "$HOME", "a\nb", "\N{GRINNING FACE}", "1e-3", "0x10", 10**30]


def test_a_file_says_nothing_that_the_command_line_cannot(tmp_path: Path) -> None:
    """Any value of any flag is taken or refused as its word would be."""
    one = [flag for flag in ALL if flag.status == SUPPORTED and flag.nargs == 1 and flag.key != "config"]
    for number, flag in enumerate(one):
        value = VALUES[number % len(VALUES)]
        args, errors = parse_all(["--config", file(tmp_path, json.dumps({flag.key: value}), "run.json")])
        words, refused = parse_all([f"{flag.name}={value}"])
        assert [error.problem for error in errors] == [error.problem for error in refused]
        assert args.values | {"config": None} == words.values and args.failed == words.failed
