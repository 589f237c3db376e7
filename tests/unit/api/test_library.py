"""``import hetero_megatron as hm`` says what the commands say, and imports nothing that it does not need."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hetero_megatron as hm
from hetero_megatron.api.jobs import words
from hetero_megatron.cli.main import main
from hetero_megatron.plans.memory.of_plan import MemoryBytes
from tests.support.paths import ROOT

NODES = [
    {"name": "fast", "count": 1, "chip": "A100-40-SXM", "chips_per_node": 2},
    {"name": "slow", "count": 2, "chip": "V100-16-SXM2", "chips_per_node": 2},
]
LINKS = {
    "intra_node": {"bandwidth": "100GB/s", "latency": "5us"}, "inter_node": {"bandwidth": "10GB/s", "latency": "10us"},
}  # fmt: skip
ASKED = {"seq_length": 256, "global_batch_size": 12}
FLAGS = ["--seq-length", "256", "--global-batch-size", "12", "--dtype", "fp16"]


@pytest.fixture(scope="module")
def cluster() -> hm.Cluster:
    return hm.Cluster.of({"nodes": NODES, "links": LINKS})


@pytest.fixture(scope="module")
def found(cluster: hm.Cluster) -> hm.Found:
    return hm.plan("tiny", cluster, dtype="fp16", more_schedules="never", **ASKED)


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_it_says_what_the_commands_say(
    found: hm.Found, cluster: hm.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plan_file = str(tmp_path / "cluster.yaml"), str(tmp_path / "plan.yaml")
    cluster.write(file)
    said = command(
        capsys, "plan", "--model", "tiny", "--cluster", file, *FLAGS, "--more-schedules", "never", "--json", "--out",
        plan_file,
    )  # fmt: skip
    assert said["fingerprint"] == found.plan.fingerprint and said["step_seconds"] == found.step_seconds
    plan = hm.Plan.read(plan_file, cluster)
    assert (plan.fingerprint, plan.dtype, plan.model.name) == (found.plan.fingerprint, "fp16", "tiny")
    predicted = hm.predict(plan, cluster)
    said = command(capsys, "predict", "--plan", plan_file, "--cluster", file, "--json")
    assert said == json.loads(json.dumps(predicted.as_json()))
    assert predicted.step_seconds == found.prediction.step_seconds == found.step_seconds
    by_formula = hm.memory(plan, cluster)
    overhead = {rank: use.overhead for rank, use in predicted.memory.items()}
    assert {rank: use.total + overhead[rank] for rank, use in by_formula.items()} == {
        rank: use.total for rank, use in predicted.memory.items()
    }
    assert hm.Memory is MemoryBytes


def test_gradients_in_bf16_take_half_the_bytes(tmp_path: Path) -> None:
    """Each of two replicas behind a slow link sends half of its gradients, and gets half of the parameters."""
    links = {"intra_node": {"bandwidth": "100GB/s"}, "inter_node": {"bandwidth": "10MB/s", "latency": "0us"}}
    cluster = hm.Cluster.of({"nodes": [NODES[0] | {"count": 2, "chips_per_node": 1}], "links": links})
    (tmp_path / "plan.yaml").write_text(
        "seq_length: 256\nglobal_batch_size: 2\npipelines:\n"
        "  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 6]}]}\n"
        "  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 6]}]}\n"
    )
    plan = hm.Plan.read(tmp_path / "plan.yaml", cluster, "tiny", dtype="fp32")
    wide, narrow = (hm.predict(plan, cluster, grad_reduce_in_bf16=given).step_seconds for given in (False, True))
    assert wide - narrow == pytest.approx(wide / 4, rel=0.02), "gradients take as long as parameters, computing nothing"


@pytest.mark.slow
def test_plans_and_clusters_are_written_and_read_as_they_are(
    found: hm.Found, cluster: hm.Cluster, tmp_path: Path
) -> None:
    found.plan.write(tmp_path / "p.yaml")
    again = hm.Plan.read(tmp_path / "p.yaml", cluster)
    assert again.text() == found.plan.text() and again.canonical == found.plan.canonical
    cluster.write(tmp_path / "c.yaml")
    assert hm.Cluster.read(tmp_path / "c.yaml").text() == cluster.text()
    assert cluster.chips == {"A100-40-SXM": 2, "V100-16-SXM2": 4} and cluster.ranks == 6
    assert cluster.without("slow-0").nodes == ("fast", "slow-1") or cluster.without("slow-0").ranks == 4
    assert cluster.with_more("2xfast").chips["A100-40-SXM"] == 6
    same = found.plan.compare(found.plan, cluster)
    assert same.speedup == 1.0 and same.seconds[0] == found.step_seconds and "1.00x" in str(same)


def test_models_come_from_names_directories_and_data(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    counted = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    read, told = hm.Model(tmp_path), hm.Model(config.to_dict())
    assert read.parameters == told.parameters == counted and read.source == str(tmp_path) and not told.source
    adapted = hm.Model("tiny").with_lora(8, ["q_proj"])
    assert adapted.spec.lora is not None and adapted.parameters == hm.Model("tiny").parameters


def test_errors_are_those_of_the_command_line(cluster: hm.Cluster, tmp_path: Path) -> None:
    with pytest.raises(hm.UserError, match=r"--seq-length = 4096: the model has 1024 positions"):
        hm.plan("gpt2", cluster, seq_length=4096, global_batch_size=4)
    with pytest.raises(hm.UserError, match="did you mean llama3-8b"):
        hm.Model("lama3-8b")
    with pytest.raises(hm.UserError, match="objective = speed"):
        hm.plan("tiny", cluster, objective="speed", **ASKED)
    with pytest.raises(hm.UserError, match="deadline_hours.*missing"):
        hm.plan("tiny", cluster, objective="deadline", train_tokens=1e9, **ASKED)
    with pytest.raises(hm.UserError, match="train_tokens.*needs objective deadline"):
        hm.plan("tiny", cluster, train_tokens=1e9, **ASKED)
    (tmp_path / "p.yaml").write_text("version: 1\n")
    with pytest.raises(hm.UserError, match="--model: missing, and the plan names none"):
        hm.Plan.read(tmp_path / "p.yaml")
    with pytest.raises(hm.UserError, match=r"data_path = \{'a': 1\}: is no value of a flag"):
        words({"data_path": {"a": 1}})


def test_keywords_are_flags() -> None:
    given = {"bf16": True, "fp16": False, "lr": 1e-3, "data_path": [0.3, "a", Path("b")], "plan": None}
    assert words(given) == ["--bf16", "--lr", "0.001", "--data-path", "0.3", "a", "b"]


def test_planning_imports_no_torch_and_no_handler_of_signals() -> None:
    program = (
        "import signal, sys\nbefore = signal.getsignal(signal.SIGINT)\nimport hetero_megatron as hm\n"
        "assert len([m for m in sys.modules if m.startswith('hetero_megatron')]) <= 3, sys.modules\n"
        "for name in hm.__all__: getattr(hm, name)\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "assert callable(hm.plan) and callable(hm.train)\nimport hetero_megatron.cli.plan\nassert callable(hm.plan)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_commands_use_it() -> None:
    """For what it offers, and nothing behind it."""
    for name in ("plan", "predict"):
        tree = ast.parse((ROOT / f"hetero_megatron/cli/{name}.py").read_text())
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        behind = re.compile(r"hetero_megatron\.(planner\.(search|report|whatif)|predictor\.[rs])")
        assert not any(map(behind.match, imported)) and any(m.startswith("hetero_megatron.api") for m in imported)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_examples_in_python_run(forked_programs: Path, tmp_path: Path) -> None:
    python = forked_programs / "python"
    run = [python, str(ROOT / "examples/small_chat_model.py"), str(tmp_path)]
    subprocess.run(run, check=True, cwd=tmp_path, capture_output=True)
    for page, count in (("README.md", 1), ("docs/library.md", 11)):  # there, ten recipes
        blocks = python_blocks(page)
        assert len(blocks) == count
        (tmp_path / "examples.py").write_text("\n".join(blocks))
        done = subprocess.run([python, "examples.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, page + done.stdout[-2000:] + done.stderr[-4000:]


def test_what_the_page_lists_is_there() -> None:
    named = set(re.findall(r"^\| `hm\.(\w+)", (ROOT / "docs/library.md").read_text(), re.MULTILINE))
    assert named and named <= set(hm.__all__)


@pytest.mark.slow
def test_ranks_of_a_job_and_a_process_on_its_own(forked_programs: Path, tmp_path: Path) -> None:
    """Under torchrun each process is a rank; alone one run after the other, with handlers of signals as before."""
    program = tmp_path / "job.py"
    program.write_text(
        "import os, signal, sys, hetero_megatron as hm\n"
        "before = signal.getsignal(signal.SIGTERM)\n"
        "flags = dict(model='tiny', mock_data=True, seq_length=32, micro_batch_size=1, global_batch_size=4, lr=1e-3)\n"
        "tp = int(os.environ.get('WORLD_SIZE', 1))\n"
        "runs = [hm.train(**flags, train_iters=2, tensor_model_parallel_size=tp) for _ in range(3 - tp)]\n"
        "assert all(list(run.losses) == [1, 2] and not run.interrupted for run in runs)\n"
        "assert runs[0].losses == runs[-1].losses and signal.getsignal(signal.SIGTERM) == before\n"
        "print(f'last {runs[0].losses[2]:.4f}')\n"
    )
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    said = []
    for start in ([], launched):
        run = [forked_programs / "python", *start, str(program)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        said.append(set(re.findall(r"last [0-9.]+", done.stdout)))
    assert said[0] == said[1] and len(said[0]) == 1
