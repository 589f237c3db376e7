"""A teacher or a reference on ranks of its own: what it says reaches the ranks that train whole, under any two plans;
and a run beside it is the run that reads the same from a file, also after a rank of it was killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from hetero_megatron.comm import Comm
from hetero_megatron.pipeline.role_scores import ScoreTransfer, packed_answers, unpacked_answers
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.roles import head_parts
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.hf_reference import make_hf
from tests.support.pool import shared_pool
from tests.support.programs import run_ranks, start_ranks
from tests.support.random_plans import random_plan
from tests.support.small_plans import LLAMA

K = 2


def scores_of(samples: range, tokens: list[int]) -> torch.Tensor:
    """Numbers in the place of scores: [b, s, 2 k + 1] int32 by sample and position."""
    place = torch.tensor(samples)[:, None] * 1000 + torch.tensor(tokens, dtype=torch.int64)
    return (place[..., None] * 10 + torch.arange(2 * K + 1)).int()


def expected(plan: Plan, rank: int, first: int, size: int, whole: bool) -> dict[tuple[int, ...], torch.Tensor]:
    found = {}
    for begin, end, tokens in head_parts(plan, size, whole).get(rank, []):
        samples = range(first + begin, first + end)
        found[tuple(samples)] = scores_of(samples, [t for a, b in tokens for t in range(a, b)])
    return found


def pass_rank(comm: Comm, pairs: list[tuple[Plan, Plan, int, int]]) -> None:
    for i, (teacher, student, first, size) in enumerate(pairs):
        whole = bool(i % 2)
        moved = ScoreTransfer(comm, teacher, student, 2 * K + 1, whole)
        if comm.rank in teacher.ranks:
            moved.send(expected(teacher, comm.rank, first, size, whole), first, size)
            moved.finish()
        elif comm.rank in student.ranks:
            wanted, rows = expected(student, comm.rank, first, size, whole), moved.receive(first, size)
            assert wanted.keys() == rows.keys()
            assert all(torch.equal(rows[samples], wanted[samples]) for samples in wanted)


def test_scores_arrive_whole_under_any_two_plans() -> None:
    """Unequal micro-batches, pipelines, inner replicas, context and TP groups on both sides; batches that the plans do
    not divide, too."""
    rng, (_, spec), pairs = random.Random(1), make_hf(LLAMA, 1), list[tuple[Plan, Plan, int, int]]()
    while len(pairs) < 12:
        count = rng.choice([2, 3, 4])
        made = [random_plan(rng, spec.num_layers, spec.num_heads, 14, ranks=n) for n in (count, 6 - count)]
        student, teacher = (plan_from_dict(each, spec) for each in made)
        teacher = teacher.with_stages(lambda stage, count=count: stage.on_ranks(lambda rank: rank + count))  # type: ignore[misc]
        pairs.append((teacher, student, rng.randrange(50), rng.choice([student.global_batch_size, 5])))
    shared_pool().run(pass_rank, pairs)


def test_log_probabilities_of_answers_are_unpacked_as_they_were_packed() -> None:
    rng, answers = random.Random(2), dict[int, tuple[float, float]]()
    rows = dict[tuple[int, ...], torch.Tensor]()
    for first in range(0, 12, 3):
        counts = tuple(rng.randrange(4) for _ in range(3))
        numbers = tuple(rng.randrange(2**40) for _ in range(sum(counts)))
        said = {number: (rng.uniform(-1e3, 0), -rng.random()) for number in numbers}
        rows[first, first + 1, first + 2] = packed_answers(numbers, counts, said, 5)
        answers |= said
    assert unpacked_answers(rows) == answers and all(part.shape == (3, 5, 6) for part in rows.values())


STUDENT = """
pipelines:
  - {micro_batch_size: 2, num_micro_batches: 1, stages: [{ranks: [0, 1], layers: [0, 2], tp: 2, tp_split: [3, 1]}]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 2, layers: [0, 2]}]}
"""
TEACHER = """
  - micro_batch_size: 3
    num_micro_batches: 1
    stages: [{{ranks: {0}, layers: [0, 1]}}, {{ranks: {1}, layers: [1, 3]}}]
  - {{micro_batch_size: 1, num_micro_batches: 1, stages: [{{ranks: {2}, layers: [0, 3]}}]}}
"""
TOP = "version: 1\nseq_length: 32\nglobal_batch_size: 4\n"
KILLED = 4


def _kill_a_teacher() -> None:
    """In the midst of a run, as it is asked for its sixth batch, a batch ahead: the second save has begun, so the first
    one is complete."""
    if os.environ["RANK"] != str(KILLED):
        return
    from hetero_megatron.training import role_ranks

    score = role_ranks.RoleBatches.work_on

    def until_then(self: Any, request: Any) -> Any:
        if request.first == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(self, request)

    role_ranks.RoleBatches.work_on = until_then  # type: ignore[method-assign]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def make_models(folder: Path, spoiled: bool = False) -> None:
    """Models of two layers, and one of three, and chats; ``spoiled``: the larger one's weights have a NaN."""
    for name, layers, seed in (("base", 2, 2), ("larger", 3, 3), ("other", 2, 4)):
        config = LlamaConfig(vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                             num_attention_heads=4, max_position_embeddings=64)  # fmt: skip
        torch.manual_seed(seed)
        made = LlamaForCausalLM(config)
        if spoiled and name == "larger":
            torch.nn.init.constant_(made.model.layers[0].mlp.down_proj.weight[3:4, 5:6], torch.nan)
        made.save_pretrained(folder / name)
        chat_tokenizer(folder / name, TEMPLATES["chatml"])
    chats = [json.dumps({"messages": turns(f"how is fox {i}", "quick and brown")}) for i in range(24)]
    (folder / "chats.jsonl").write_text("\n".join(chats))


TWO = TOP + """
roles: {teacher: {pipelines: [{micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 3]}]}]}}
pipelines: [{micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 2]}]}]
"""


def two_ranks(folder: Path) -> list[str]:
    """A teacher on rank 0 and a student on rank 1."""
    (folder / "plan.yaml").write_text(TWO)
    return (
        f"--plan {folder}/plan.yaml --load-hf {folder}/base --teacher-hf {folder}/larger --sft --split 1 --lr 1e-3 "
        f"--data-path {folder}/chats.jsonl --no-kernel-check --log-interval 1 --save {folder}/run --train-iters 5000"
    ).split()


def test_a_teacher_whose_scores_are_nan_ends_the_run_in_one_line(tmp_path: Path) -> None:
    make_models(tmp_path, spoiled=True)
    _, err = run_ranks(2, two_ranks(tmp_path), code=2)
    lines = err.splitlines()
    assert len(lines) == 2 and all("--teacher-hf" in line and "is not a number" in line for line in lines), err


SPLIT = TOP + """
pipelines: [{micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 2]}]}]
roles:
  teacher:
    pipelines:
      - micro_batch_size: 4
        num_micro_batches: 1
        stages: [{ranks: 1, layers: [0, 1]}, {ranks: 2, layers: [1, 3]}]
"""


@pytest.mark.slow
def test_one_rank_of_the_teacher_without_its_weights_ends_the_run_in_one_line(tmp_path: Path) -> None:
    make_models(tmp_path)
    words = two_ranks(tmp_path)
    (tmp_path / "plan.yaml").write_text(SPLIT)
    shutil.copytree(tmp_path / "larger", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    at = words.index("--teacher-hf")
    given, own = words[:at] + words[at + 2 :], {r: ["--teacher-hf", str(tmp_path / "larger")] for r in (0, 1)}
    programs = start_ranks(3, given, own | {2: ["--teacher-hf", str(tmp_path / "bare")]})
    printed = [program.communicate(240)[1] for program in programs]
    assert [program.returncode for program in programs] == [2, 2, 2], printed
    assert len({*printed}) == 1 and printed[0].count("\n") == 1 and "bare" in printed[0], printed


@pytest.mark.slow
def test_a_signal_to_the_teacher_ends_the_run_after_a_step(tmp_path: Path) -> None:
    make_models(tmp_path)
    teacher, student = programs = start_ranks(2, two_ranks(tmp_path))
    student.until(" iteration ")
    teacher.send_signal(signal.SIGTERM)
    printed = [program.communicate(240) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], printed
    assert "received SIGTERM" in printed[1][0] and (tmp_path / "run" / "latest").exists(), printed


@pytest.mark.slow
def test_a_teacher_that_is_killed_beside_its_student_changes_nothing(tmp_path: Path) -> None:
    make_models(tmp_path)
    (tmp_path / "student.yaml").write_text(TOP + STUDENT)
    (tmp_path / "teacher.yaml").write_text(TOP + "pipelines:" + TEACHER.format(0, 1, 2))
    roles = "roles:\n teacher:\n  pipelines:" + TEACHER.format(3, 4, 5).replace("\n", "\n  ")
    (tmp_path / "both.yaml").write_text(TOP + roles + STUDENT)
    data = f"--sft --data-path {tmp_path}/chats.jsonl --split 80,20,0 --fp64 --no-kernel-check --train-iters 6 "
    data += "--eval-interval 3 --eval-iters 1 --distill-temperature 2"
    scored = f"--load-hf {tmp_path}/larger --save-scores {tmp_path}/scores --plan {tmp_path}/teacher.yaml {data}"
    run_ranks(3, [*scored.split(), "--score-top-k", "5"])
    learn = f"--load-hf {tmp_path}/base --lr 1e-3 --lr-decay-style constant --log-interval 1 {data}"
    run_ranks(3, f"--plan {tmp_path}/student.yaml --teacher-scores {tmp_path}/scores {learn} "
                 f"--save {tmp_path}/file".split())  # fmt: skip
    beside = f"--plan {tmp_path}/both.yaml --teacher-hf {tmp_path}/larger --score-top-k 5 {learn} --save-interval 2 "
    words = [*beside.split(), "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    programs = start_ranks(6, words, before=_kill_a_teacher)
    ended = [program.communicate(240) for program in programs]
    codes = [program.returncode for program in programs]
    assert codes[KILLED] == -signal.SIGKILL and set(codes) == {3, -signal.SIGKILL}, ended
    assert all(err.count("\n") == 1 for i, (_, err) in enumerate(ended) if i != KILLED), ended
    out, _ = run_ranks(6, words)
    assert "loaded" in out and metrics(tmp_path / "run")[-1]["step"] == 6
    wanted, found = ([{key: row[key] for key in row if "loss" in key or "distill" in key or "norm" in key}
                      for row in metrics(tmp_path / name)] for name in ("file", "run"))  # fmt: skip
    assert wanted == found and len(wanted) == 8


REFERENCE = """
  - micro_batch_size: 2
    num_micro_batches: 1
    stages: [{{ranks: [{0}, {1}], layers: [0, 2], tp: 2, tp_split: [1, 3]}}]
  - micro_batch_size: 1
    num_micro_batches: 2
    stages: [{{ranks: {2}, layers: [0, 1]}}, {{ranks: {3}, layers: [1, 2]}}]
"""
RECORDS = {
    "dpo": [{"prompt": f"fox {i}", "chosen": "quick " * (i % 3 + 1), "rejected": "lazy dog"} for i in range(40)],
    "kto": [{"prompt": f"fox {i}", "completion": "brown " * (i % 4 + 1), "label": i % 3 > 0} for i in range(120)],
}


@pytest.mark.slow
def test_a_reference_on_its_own_ranks_says_what_it_wrote_in_a_file(tmp_path: Path) -> None:
    """The same losses, bit for bit, also of evaluations."""
    make_models(tmp_path)
    alone = "  - {{micro_batch_size: 2, num_micro_batches: 2, stages: [{{ranks: {0}, layers: [0, 2]}}]}}\n"
    cases = {"dpo": (STUDENT, 3, REFERENCE, 4), "kto": ("pipelines:\n" + alone.format(0), 1, "\n" + alone, 1)}
    for loss, records in RECORDS.items():
        policy, trained, reference, others = cases[loss]
        (tmp_path / "policy.yaml").write_text(TOP + policy)
        (tmp_path / "reference.yaml").write_text(TOP + "pipelines:" + reference.format(*range(others)))
        apart = reference.format(*range(trained, trained + others)).replace("\n", "\n  ")
        (tmp_path / "both.yaml").write_text(f"{TOP}roles:\n reference:\n  pipelines:{apart}\n{policy}")
        (tmp_path / f"{loss}.jsonl").write_text("\n".join(map(json.dumps, records)))
        data = f"--sft --preference {loss} --data-path {tmp_path}/{loss}.jsonl --split 80,20,0 --fp64 "
        data += "--no-kernel-check --train-iters 4 --eval-interval 2 --eval-iters 1"
        scores, other = f"{tmp_path}/{loss}.scores", f"{tmp_path}/other"
        run_ranks(others, f"--load-hf {other} --save-scores {scores} --plan {tmp_path}/reference.yaml {data}".split())
        learn = f"--load-hf {tmp_path}/base --reference-hf {other} --lr 1e-3 --log-interval 1 {data} "
        learn += f"--save {tmp_path}/{loss}"
        run_ranks(trained, f"{learn}-file --plan {tmp_path}/policy.yaml --reference-logps {scores}".split())
        run_ranks(trained + others, f"{learn}-ranks --plan {tmp_path}/both.yaml".split())
        rows = [metrics(tmp_path / f"{loss}-{name}") for name in ("file", "ranks")]
        wanted, found = ([{key: row[key] for key in row if re.search("loss|rewards|norm|kl", key)} for row in of_run]
                         for of_run in rows)  # fmt: skip
        assert wanted == found and len(wanted) == 6 and any("rewards/margins" in row for row in wanted), wanted


def test_no_search_and_no_other_plan_changes_the_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a plan with roles: nothing replaces it by one whose teacher is on the student's ranks."""
    make_models(tmp_path)
    words = [*two_ranks(tmp_path)[2:], "--load", str(tmp_path / "run")]
    (tmp_path / "one.yaml").write_text(TOP + TWO.splitlines()[-1].replace("ranks: 1", "ranks: 0"))
    run = ["run", "--plan", str(tmp_path / "plan.yaml")]
    capsys.readouterr()
    drift = ["--cluster", "examples/clusters/testbed.yaml", "--", *words, "--replan-on-drift", "1.5"]
    for given, refused in (
        (["--fallback-plan", str(tmp_path / "one.yaml"), "--", *words], "--fallback-plan"),
        (["--on-failure", "replan", "--cluster", "examples/clusters/testbed.yaml", "--", *words], "--on-failure"),
        (drift, "--replan-on-drift"),
    ):
        assert main([*run, *given]) == 2
        told = capsys.readouterr().err
        assert refused in told and "roles" in told and told.count("\n") == 1, told
    assert main(["predict", "--plan", str(tmp_path / "plan.yaml"), "--cluster", "examples/clusters/testbed.yaml",
                 "--model", str(tmp_path / "base")]) == 2  # fmt: skip
    assert "which model the teacher is" in capsys.readouterr().err
