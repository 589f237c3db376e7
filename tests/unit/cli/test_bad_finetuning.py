"""Bad input of fine-tuning, generation, preprocessing and conversion: one message that names what is wrong, no more."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from hetero_megatron.data.scores_file import create_scores
from hetero_megatron.training.reference import KIND
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.paths import ROOT

TABLE = ROOT / "tests" / "fixtures" / "bad_finetuning.txt"
CASES = [
    [cell.strip() for cell in line.split("|")]
    for line in TABLE.read_text().splitlines()
    if line[:1] not in ("", "#")
]  # fmt: skip
FILES = {
    "plain.txt": "a text\n", "empty.jsonl": '{"messages": []}\n', "nothing.jsonl": "", "broken.jsonl": "{no\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
    "equal.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "b"}\n', "torn.json": '{"version": 1}',
    "mute.jsonl": '{"prompt": "a", "chosen": "b", "rejected": ""}\n',
    "filled.jsonl": json.dumps({"prompt": "word " * 90, "chosen": "a", "rejected": "b"}) + "\n",
    "labels.jsonl": '{"prompt": "a", "completion": "b", "label": "good"}\n',
    "silent.jsonl": '{"prompt": "a", "completion": " ", "label": true}\n',
    "prompts.jsonl": '{"prompt": "a"}\n', "no_prompt.jsonl": '{"question": "a"}\n', "void.jsonl": '{"prompt": ""}\n',
    "answered.jsonl": '{"prompt": [{"role": "assistant", "content": "a"}]}\n',
    "long.jsonl": json.dumps({"prompt": "word " * 90}) + "\n", "torn.py": "def f(",
    "rewards.py": """def good(completions, **_): return [len(text) for text in completions]
def raises(completions, **_): raise ValueError("no luck")
""",
    "one.jsonl": '{"prompt": "a", "completion": "b", "label": true}\n',
    "hollow.jsonl": '{"messages": [{"role": "user"}]}\n', "numbers.jsonl": "[1, 2]\n", "broken.jinja": "{% for %}",
    "roles.jsonl": '{"messages": [{"role": 5, "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "plain.jsonl": '{"text": "a"}\n', "ia3/adapter_config.json": '{"peft_type": "IA3"}',
    "torn/adapter_config.json": '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}',
    "ranks/adapter_config.json":
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 0}}',
    "router/adapter_config.json":
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [], "target_parameters": ["gate.weight"]}',
    "dora/adapter_config.json":
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "use_dora": true,'
        ' "lora_dropout": 0.5}',
    "odd/adapter_config.json":
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "use_dora": "yes"}',
    "torn/adapter_model.safetensors": "torn", "hollow/notes": "", "deepspeed/latest": "global_step1",
    "megatron/latest_checkpointed_iteration.txt": "9", "megatron/iter_0000001/mp_rank_00/model_optim_rng.pt": "torn",
    "experts/mp_rank_00_000_001/model_optim_rng.pt": "x", "experts/mp_rank_00_000_000/model_optim_rng.pt": "x",
    "deepspeed/global_step1/mp_rank_00_model_states.pt": "x",
}  # fmt: skip
STUDENT = """version: 1
seq_length: 32
global_batch_size: 1
pipelines: [{micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 1]}]}]
"""
APART = "{pipelines: [{micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 1]}]}]}"
GRPO = "--grpo --split 1 --max-new-tokens 4 --global-batch-size 2 --grpo-group-size 2 --no-kernel-check"
FILES |= {
    f"{name}.yaml": f"{STUDENT}roles: {roles}\n" for name, roles in {
        "apart": f"{{teacher: {APART}}}", "judge": f"{{judge: {APART}}}", "idle": "{teacher: {}}",
        "referred": f"{{reference: {APART}}}", "shared": f"{{reference: {APART.replace('ranks: 1', 'ranks: 0')}}}",
        "twice": f"{{teacher: {APART.replace('ranks: 1', 'ranks: 0')}}}",
        "trained": f"{{teacher: {APART.replace('ranks: 1', 'ranks: 1, recompute: full')}}}",
        "outer": f"{{teacher: {APART}}}\nouter: {{islands: [0], every: 4}}",
    }.items()
}  # fmt: skip
FILES |= {
    f"{name}.yaml": f"{STUDENT}roles: {{generator: {apart}}}\n".replace("size: 1", "size: 2")
    for name, apart in {
        "generator": APART, "deep": APART.replace("[0, 1]", "[0, 2]"), "turns": APART.replace("ranks: 1", "ranks: 0"),
        "idles": APART.replace("ranks: 1", "ranks: [1, 2], tp: 1"),
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    chats = [json.dumps({"messages": turns(f"how is fox {i}", "quick and brown")}) for i in range(8)]
    (root / "chats.jsonl").write_text("\n".join(chats) + "\n")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    for folder in ("bare", "base"):
        LlamaForCausalLM(config).save_pretrained(root / folder)
    chat_tokenizer(root / "base", TEMPLATES["chatml"])
    for folder, more in (("wide", {"vocab_size": 331}), ("short", {"max_position_embeddings": 16})):
        replace_config(config, root / folder, more)
    swap_tokens(root / "base", root / "swapped")
    other = [json.dumps({"messages": turns(f"how is dog {i}", "slow and grey")}) for i in range(8)]
    (root / "chats2.jsonl").write_text("\n".join(other) + "\n")
    create_scores(str(root / "other.json"), "", {"kind": KIND, "made_for": {"model": "x"}}, {}).complete()
    chat_tokenizer(root / "plain", None)
    broken = LlamaForCausalLM(config)
    torch.nn.init.constant_(broken.model.layers[0].mlp.down_proj.weight[3:4, 5:6], torch.nan)
    broken.save_pretrained(root / "nan")
    for source, target in (("base", "native"), ("bare", "bare_native")):
        assert main(["convert", str(root / source), str(root / target)]) == 0
    words = f"--load-hf {root}/base --seq-length 32 --micro-batch-size 1 --train-iters 2 --split 1 --eval-iters 0"
    data = f"--sft --data-path {root}/chats.jsonl --save-scores {root}/scores --score-top-k 4 --no-kernel-check"
    assert main(["score", *words.split(), *data.split()]) == 0
    run = f"--load-hf {root}/base --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3"
    return {
        "TMP": str(root), "BASE": f"{root}/base", "CHATS": f"{root}/chats.jsonl", "NATIVE": f"{root}/native",
        "BARE": f"{root}/bare_native", "PLAIN": f"{root}/plain", "PLAINS": f"{root}/plain.jsonl", "RUN": run,
        "NAN": f"{root}/nan", "GRPO": f"{run} {GRPO} --data-path {root}/prompts.jsonl", "JUDGE": f"{root}/rewards.py",
    }  # fmt: skip


def replace_config(config: LlamaConfig, folder: Path, more: dict[str, int]) -> None:
    LlamaForCausalLM(LlamaConfig(**(config.to_dict() | {"num_key_value_heads": None, "head_dim": None} | more))
                     ).save_pretrained(folder)  # fmt: skip


def swap_tokens(model: Path, folder: Path) -> None:
    """The same model beside a tokenizer in which two tokens are the other way round."""
    shutil.copytree(model, folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    vocab = made["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(made))


def filled(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace("{" + name + "}", value)
    return text


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_one_message_says_what_is_wrong(
    case: list[str], names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, field, also, words = (filled(cell, names) for cell in case)
    root = Path(names["TMP"])
    before = sorted(root.rglob("*"))
    capsys.readouterr()
    code = main(shlex.split(words))
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if "error:" in line]
    assert code == 2 and len(errors) == 1, err
    assert field in errors[0] and also in errors[0] and "Traceback" not in err, err
    kept = [path for path in sorted(root.rglob("*")) if path not in before]
    assert not kept, "something was left behind"


def test_there_are_enough() -> None:
    doors = {case[3].split()[0] for case in CASES}
    assert len(CASES) >= 40 and doors == {"finetune", "generate", "preprocess", "convert", "score"}
