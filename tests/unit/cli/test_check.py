"""``hetero-megatron check``: scripts are read as a shell reads them, nothing is run, and every flag is judged."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cli.check import check_launch, main
from hetero_megatron.cli.foreign_launch import launches_of
from hetero_megatron.cli.shell_script import read_script, shown, unresolved
from tests.support.paths import FIXTURES

# Scripts whose words bash says, by a function that prints them.
AS_BASH = {
    "defaults and sums": 'A=${A:-8}; B=$((A * 2 + 1)); echo $A "$B" ${C-none} ${A:+yes}',
    "arrays": 'X=(--a 1 # why\n  "b c")\nX+=(d)\necho "${X[@]}" ${X[@]} end',
    "quotes": "A='x  y'; echo $A \"$A\" 'a'\"b\"c\\ d \"say \\\"hi\\\"\" ''",
    "lines": 'A="\n --x 1 \\\n --y 2\n"\necho $A \\\n  --z 3 # no\necho "#" a#b',
    "strings grow": 'A="--x 1"; A="$A --y 2"; A+=" --z"; echo $A > /dev/null 2>&1; echo $A',
    "export": 'export A=1 B="2 3"; readonly C=4; echo ${A} $B $C',
    "nothing": 'A=; echo $A "$A" ${B} end',
    "here-document": "cat <<EOF > /dev/null\necho no\nEOF\necho yes",
    "a pipe": "echo a 2>&1 | cat; echo b && echo c",
    "nested": 'A=1; B="${X:-${A}2}"; echo $B "${Y:-a b}"',
    "arithmetic of names": "N=2; G=8; W=$(($N*$G)); echo $W $((W/G)) $(( (W - 1) % 5 ))",
}  # fmt: skip


def test_words_are_those_of_bash(tmp_path: Path) -> None:
    for name, script in AS_BASH.items():
        show = 'echo() { printf "%s\\0" "$@"; printf "\\n"; }\ncat() { command cat > /dev/null; }\n'
        file = tmp_path / "script.sh"
        file.write_text(show.replace("cat() { command cat > /dev/null; }", "") + script)
        done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True, env={})
        wanted = [line.split("\0")[:-1] for line in done.stdout.split("\n") if line]
        found = [list(c.words[1:]) for c in read_script(script) if c.words[0] == "echo"]
        if name in ("strings grow", "nothing"):  # unset is not empty here, and what goes elsewhere is not in the output
            found = [[word for word in words if not unresolved(word)] for words in found]
        wanted = wanted[-1:] if name == "strings grow" else wanted
        assert found[-len(wanted) :] == wanted, (name, found, wanted)


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
GPUS=8
NODES=${NNODES:-1}
DATA=$1
LAUNCH=(--nproc_per_node $GPUS --nnodes $NODES)
MODEL="
    --num-layers 4
    --hidden-size 64 --num-attention-heads 4 \\
    --seq-length 128
"
if [ "$FP16" = 1 ]; then MODEL+=" --fp16"; fi
echo about to train
torchrun ${LAUNCH[@]} pretrain_gpt.py $MODEL --micro-batch-size 1 --global-batch-size $((GPUS * 2)) --lr 1e-4 \\
    --train-iters 10 --data-path $DATA --use-mcore-models --adam-beta1 3 --tensor-model-parallel-sise 2 $(extra) \\
    --tensor-model-parallel-size 2 2>&1 | tee log
"""


def test_every_flag_of_a_script_is_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    assert main([str(file), "--json"]) == 2
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    status = {flag["flag"]: flag["status"] for flag in launch["flags"]}
    assert launch["ranks"] == 8 and launch["line"] == 14 and not launch["ok"] and launch["refused"] == []
    assert status == {
        "--num-layers": "honoured", "--hidden-size": "honoured", "--num-attention-heads": "honoured",
        "--seq-length": "honoured", "--fp16": "not resolved", "--micro-batch-size": "honoured",
        "--global-batch-size": "honoured", "--lr": "honoured", "--train-iters": "honoured",
        "--data-path": "not resolved", "--use-mcore-models": "noticed", "--adam-beta1": "refused",
        "--tensor-model-parallel-sise": "refused", "$(extra)": "not resolved",
        "--tensor-model-parallel-size": "honoured",
    }  # fmt: skip
    assert main([str(file), "--set", "1=corpus"]) == 2
    out = capsys.readouterr().out
    assert "--data-path corpus" in out and "--tensor-model-parallel-size" in out and "\ue000" not in out
    assert not list(tmp_path.glob("log*"))


def test_flagscale_and_nemo(tmp_path: Path) -> None:
    yaml = (
        "system: {tensor_model_parallel_size: 2, precision: {bf16: true}, checkpoint: {save_interval: 5}}\n"
        "model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 128, micro_batch_size: 1,\n"
        "  train_iters: 10, optimizer: {lr_scheduler: {lr: 1.0e-3}}, disable_bias_linear: true, swiglu: false}\n"
        "data: {data_path: x, split: '1', tokenizer: {vocab_size: 64, tokenizer_type: NullTokenizer}}\n"
    )
    (launch,) = launches_of(yaml, "c.yaml", {})
    assert check_launch(launch).ok, check_launch(launch)
    assert "--swiglu" not in launch.flags and "--disable-bias-linear" in launch.flags
    assert check_launch(launch).ranks == 2
    nemo = (
        "python /opt/NeMo/megatron_gpt_pretraining.py trainer.devices=4 trainer.num_nodes=2 trainer.max_steps=9 "
        "trainer.precision=bf16 model.num_layers=4 model.hidden_size=64 model.num_attention_heads=4 "
        "model.encoder_seq_length=64 model.micro_batch_size=1 ++model.optim.lr=1e-4 model.data.data_prefix=[1.0,/d] "
        "model.mcore_gpt=True"
    )
    (launch,) = launches_of(nemo, "x.sh", {})
    verdict = check_launch(launch)
    assert verdict.ranks == 8 and not [f for f in verdict.flags if f.status == "refused"]
    assert {f.flag for f in verdict.flags if f.status == "noticed"} == {"model.mcore_gpt"}
    assert "--data-path 1.0 /d" in shlex.join(launch.flags) and "--bf16" in launch.flags


NEMO = (
    "python t.py trainer.devices=1 trainer.max_steps=9 model.num_layers=2 model.hidden_size=64 "
    "model.num_attention_heads=4 model.encoder_seq_length=64 model.micro_batch_size=1 model.optim.lr=1e-3 "
    "model.data.data_prefix=[1.0,stdlib] "
)
# Words after the others -> flags that they stand for, or (key, status, words of the reason).
OVERRIDES: list[tuple[str, tuple[str, ...] | tuple[str, str, str]]] = [
    ("model.bias=False", ("--disable-bias-linear",)), ("model.bias=true", ("model.bias", "honoured", "")),
    ("model.share_embeddings_and_output_weights=FALSE", ("--untie-embeddings-and-output-weights",)),
    ("model.activation=fast-swiglu", ("--swiglu",)), ("model.activation=reglu", ("model.activation", "refused", "")),
    ("model.activation='squared-relu'", ("--squared-relu",)),
    ("model.activation=gelu", ("model.activation", "honoured", "")),
    ("model.normalization=RMSNorm", ("--normalization", "RMSNorm")),
    ("model.normalization=layernorm1p", ("model.normalization", "refused", "")),
    ("trainer.precision=bf16-true", ("--bf16",)), ("+trainer.precision=16", ("--fp16",)),
    ("trainer.precision=32-true", ("trainer.precision", "honoured", "")), ("trainer.precision=16-mixed", ("--fp16",)),
    ("trainer.precision=transformer-engine", ("trainer.precision", "refused", "bf16-mixed")),
    ("trainer.precision=64", ("trainer.precision", "refused", "")),
    ("trainer.precision=FP32", ("trainer.precision", "honoured", "")),
    ("model.num_query_groups=2", ("--group-query-attention", "--num-query-groups", "2")),
    ("model.num_query_groups=null", ("model.num_query_groups", "honoured", "")),
    ("model.optim.betas=[0.9,0.98]", ("--adam-beta1", "0.9", "--adam-beta2", "0.98")),
    ("'model.optim={name: fused_adam, eps: 1e-7}'", ("--optimizer", "adam", "--adam-eps", "1e-7")),
    ("model.optim.name=adafactor", ("model.optim.name", "refused", "fused_adam")),
    ("model.optim.sched.name=NoamAnnealing", ("model.optim.sched.name", "refused", "")),
    ("model.fp8=True ++model.fp8_e4m3=True", ("--fp8-format", "e4m3")), ("model.fp8=true", ("--fp8-format", "hybrid")),
    ("model.bias_activation_fusion=False", ("--no-bias-gelu-fusion",)),
    ("model.data.data_impl=mock", ("--mock-data",)), ("+model.data.mock_dataset=True", ("--mock-data",)),
    ("trainer.precision=bf16 'model.precision=${trainer.precision}'", ("--bf16", "--bf16")),
    ("model.headscale=false", ("model.headscale", "honoured", "")),
    ("model.headscale=true", ("model.headscale", "refused", "")),
    ("model.transformer_block_type=post_ln", ("model.transformer_block_type", "refused", "pre_ln")),
    ("trainer.accumulate_grad_batches=1.0", ("trainer.accumulate_grad_batches", "honoured", "")),
    ("trainer.accumulate_grad_batches=4", ("trainer.accumulate_grad_batches", "refused", "")),
    ("exp_manager.resume_if_exists=false", ("exp_manager.resume_if_exists", "noticed", "experiment")),
    ("model.normalizashun=rmsnorm", ("model.normalizashun", "refused", "model.normalization?")),
    ("model.qk_layrnorm=false", ("model.qk_layrnorm", "noticed", "not known")),
    ("model.alibi_slopes=[1,2]", ("model.alibi_slopes", "refused", "not known here")),
    ("~model.optim.sched", ("~model.optim.sched", "refused", "")),
    ("~exp_manager.create_wandb_logger", ("~exp_manager.create_wandb_logger", "noticed", "")),
    ("model/optim=distributed", ("model/optim=distributed", "refused", "YAML")), ("name=run7", ("name", "noticed", "")),
    ("restore_from_path=x.nemo", ("restore_from_path", "refused", "")), ("stray", ("stray", "refused", "no override")),
    ("--config-name=llama --config-path conf", ("--config-path", "noticed", "YAML")),
    ("model.tokenizer.library=huggingface model.tokenizer.type=gpt2",
     ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2")),
    ("'model.data.data_prefix={train:[1.0,/a],validation:[/b],test:[\"/c, d\"]}'",
     ("--train-data-path", "1.0", "/a", "--valid-data-path", "/b", "--test-data-path", "/c, d")),
    ("\"model.data.data_prefix='[0.5, s3://b/x]'\"", ("--data-path", "0.5", "s3://b/x")),
    ("'model.data.seq_length=${model.encoder_seq_length}'", ("--seq-length", "64")),
    # NeMo 2's, which were noticed as of Lightning; other parts with keys of the same name.
    ("trainer.strategy.tensor_model_parallel_size=2", ("--tensor-model-parallel-size", "2")),
    ("++trainer.strategy.ddp.num_distributed_optimizer_instances=2", ("--num-distributed-optimizer-instances", "2")),
    ("trainer.strategy.ckpt_async_save=true", ("trainer.strategy.ckpt_async_save", "refused", "not known")),
    ("data.global_batch_size=8 optim.config.min_lr=1e-5", ("--global-batch-size", "8", "--min-lr", "1e-5")),
    ("trainer.plugins.precision=bf16-mixed 'data.paths=[1.0,stdlib]'", ("--bf16", "--data-path", "1.0", "stdlib")),
    ("optim.lr_scheduler.warmup_steps=2 optim.lr_scheduler.constant_steps=4",
     ("--lr-warmup-iters", "2", "--lr-decay-iters", "5")),
    ("resume.restore_config.path=/c", ("resume.restore_config.path", "refused", "")),
    ("exp_manager.resume_from_checkpoint=/c", ("exp_manager.resume_from_checkpoint", "refused", "")),
    ("log.ckpt.save_top_k=1 --yes", ("log.ckpt.save_top_k", "noticed", "--save")),
    ("-y", ("-y", "noticed", "")),
    ("model.data.validation_ds.micro_batch_size=4",
     ("model.data.validation_ds.micro_batch_size", "refused", "nothing is read under model.data.validation_ds")),
    ("model.encoder.num_layers=2", ("model.encoder.num_layers", "refused", "nothing is read under model.encoder")),
    ("model.data.train_ds.seed=null", ("model.data.train_ds.seed", "honoured", "")),
    ("model.data.seq_length=32", ("model.data.seq_length", "refused", "model.encoder_seq_length says 64")),
    ("trainer.precision=bf16 model.precision=bf16-mixed", ("--bf16", "--bf16")),
    ("'model.data.index_mapping_dir=${exp.dir}/x'", ("--data-cache-path", "\ue000${exp.dir}\ue001/x")),
    ("model.fp8=$FP8", ("model.fp8", "not resolved", "$FP8")),
    ("model.headscale=$X", ("model.headscale", "not resolved", "")),
    ("trainer.precision=${P}", ("trainer.precision", "not resolved", "known only when")),
    ("model.fp8=False model.fp8_margin=0", ("model.fp8_margin", "noticed", "only beside model.fp8")),
    ("model.fp8=True model.fp8_margin=0", ("--fp8-format", "hybrid", "--fp8-margin", "0")),
    ("model.cpu_offloading_num_layers=2", ("model.cpu_offloading_num_layers", "noticed", "model.cpu_offloading=True")),
    ("model.cpu_offloading=true model.cpu_offloading_num_layers=1", ("--cpu-offloading-num-layers", "1")),
    ("model.optim.sched.warmup_steps=2 model.optim.sched.constant_steps=3", ("--lr-decay-iters", "6")),
    ("'model.optim.sched={max_steps: 8, constant_steps: 3, warmup_steps: 1}'", ("--lr-decay-iters", "5")),
    ("model.optim.sched.warmup_ratio=0.1 model.optim.sched.constant_steps=3",
     ("model.optim.sched.constant_steps", "refused", "")),
    ("model.optim.sched.constant_steps=3", ("model.optim.sched.constant_steps", "refused", "")),
    ("model.use_scaled_init_method=True", ("model.use_scaled_init_method", "honoured", "")),
    ("model.ffn_dropout=0.0", ("model.ffn_dropout", "honoured", "")),
    ("model.ffn_dropout=0.1", ("model.ffn_dropout", "refused", "")),
    ("model.tokenizer.library=sentencepiece", ("--tokenizer-type", "SentencePieceTokenizer")),
    ("run.time_limit=4:00 ++cluster_type=BCP", ("run.time_limit", "noticed", "launcher")),
]  # fmt: skip


def test_every_override_of_nemo_is_accounted_for() -> None:
    for words, want in OVERRIDES:
        (launch,) = launches_of(NEMO + words, "x.sh", {})
        if want[0].startswith("--") and want[1:2] != ("noticed",):
            assert shlex.join(want) in shlex.join(launch.flags), (words, launch)
        else:
            flags = {f.flag: f for f in launch.others}
            assert want[0] in flags, (words, launch.others)
            found = flags[want[0]]
            assert found.status == want[1] and want[2] in f"{found.reason} {found.accepted}", (words, found)
    (launch,) = launches_of(NEMO, "x.sh", {})
    assert check_launch(launch).ok and "YAML is not read" in check_launch(launch).notices[0]
    (launch,) = launches_of(f"{NEMO} model.activation=reglu", "x.sh", {})
    assert not check_launch(launch).ok
    (launch,) = launches_of("nemo llm pretrain --factory llama3_8b trainer.max_steps=9", "x.sh", {})
    assert launch.flags == ("--train-iters", "9") and launch.others[0].values == ["llama3_8b"]
    for words, ranks in (("[0,1]", 2), ("'[0, 1, 2]'", 3), ("\"['0','1']\"", 2), ("0,1", 2), ("8", 8), ("-1", None),
                         ("auto", None), ("[0,1] trainer.num_nodes=3", 6), ("$GPUS", None)):  # fmt: skip
        (launch,) = launches_of(f"{NEMO} ++trainer.devices={words}", "x.sh", {})
        assert launch.ranks == ranks, (words, launch)


def test_known_launch_lines_are_judged_as_training_judges_them() -> None:
    for file in sorted((FIXTURES / "launch_lines").glob("*.sh")):
        header = "".join(line for line in file.read_text().splitlines() if line.startswith(("# refused", "# drop")))
        world = int(re.search(r"# world: (\d+)", file.read_text())[1])
        (launch,) = launches_of(file.read_text(), file.name, {})
        verdict = check_launch(launch, world)
        assert launch.ranks in (None, world)
        for flag in verdict.flags:
            assert (flag.status == "refused") <= (flag.flag in header), (file.name, flag)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("ab=1+-$(){}[]\"'`\\ \n;|&<>#@*:EOF", max_size=60))
def test_no_text_ends_badly(text: str) -> None:
    for command in read_script(text):
        for word in command.words:
            shown(word)
    launches_of(f"python pretrain_gpt.py --a {text}", "x.sh", {})


def test_variables_that_double_end(tmp_path: Path) -> None:
    text = "A0=xxxxxxxxxx\n" + "\n".join(f"A{i + 1}=$A{i}$A{i}" for i in range(60)) + "\necho $A60\n"
    read_script(text)
