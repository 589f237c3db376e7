"""What is not weights travels along every way that weights go, and nothing travels that is not the model's."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hetero_megatron.checkpoint.manifest import read_sums
from hetero_megatron.checkpoint.model_files import HUB_PATTERNS, from_checkpoint, from_directory, is_known
from hetero_megatron.cli.main import main
from tests.distributed.checkpoint.test_hf_load import MODELS
from tests.support.programs import inside

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
FILES = {  # of every kind, with bytes that no library would write anew alike
    "tokenizer.model": b"\x00spm", "tokenizer.model.v3": b"v3", "spiece.model": b"\x01", "vocab.txt": b"a\nb\n",
    "added_tokens.json": b'{"<x>":  299}', "special_tokens_map.json": b"{ }", "qwen.tiktoken": b"IQ== 0\n",
    "chat_template.json": b'{"chat_template": "x"}', "additional_chat_templates/rag.jinja": b"{{ rag }}",
    "chat_templates/tool.jinja": b"{{ tool }}", "generation_config.json": b'{"do_sample": true,   "top_k": 3}',
    "preprocessor_config.json": b"{}", "README.md": b"# model", "LICENSE": b"terms", "NOTICE.txt": b"notice",
}  # fmt: skip
RUN = ["--mock-data", "--seq-length", "32", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3"]
SIZES = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --split 1"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3"
)
TEXT = "the quick brown fox jumps over the lazy dog "


def tokenizer(directory: Path, eos: str = "<eos>", first: str = "<s>") -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[first, eos], show_progress=False, initial_alphabet=alphabet
    )
    bpe.train_from_iterator([TEXT * 20], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=eos, bos_token=first)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return fast


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with everything."""
    path = tmp_path_factory.mktemp("hf") / "in"
    config = MODELS["qwen3"] | {"vocab_size": 300, "eos_token_id": [7, 9], "bos_token_id": 8, "pad_token_id": 9}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written |= {"unsloth_version": "1", "some_note": None, "use_cache": False}
    (path / "config.json").write_text(json.dumps(written))
    tokenizer(path)
    for name, content in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


def same_model_files(source: Path, target: Path, **changed: object) -> None:
    """Every companion byte for byte; config.json with nothing but ``changed`` changed."""
    names = [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]
    along = [n for n in names if n != "config.json" and not n.startswith("model")]
    assert set(FILES) < set(along) and {"tokenizer.json", "chat_template.jinja"} < set(along)
    for name in along:
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    want = json.loads((source / "config.json").read_text()) | changed
    assert json.loads((target / "config.json").read_text()) == want
    messages = [{"role": "user", "content": "hi"}]
    said = [AutoTokenizer.from_pretrained(d).apply_chat_template(messages, tokenize=False) for d in (source, target)]
    assert said[0] == said[1] == "<user>hi<eos>"


def train(directory: Path, *runs: list[str]) -> list[str]:
    """What trainings print that run one after the other in ``directory``."""
    with contextlib.chdir(directory):
        return [inside(words)[0] for words in runs]


def convert(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *words: str) -> str:
    assert main(["convert", str(source), str(target), *words]) == 0
    return capsys.readouterr().err


def test_convert_there_and_back_and_again(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [model, *(tmp_path / name for name in ("native", "out", "native2", "out2"))]
    for source, target in zip(places, places[1:]):
        assert convert(capsys, source, target) == ""
    for target in (places[2], places[4]):
        same_model_files(model, target, dtype="float32")


def test_through_trainings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--save-hf from --load-hf, also stretched; from native checkpoints that go on, trained here and converted."""
    (tmp_path / "in").symlink_to(model)
    convert(capsys, model, tmp_path / "converted")
    more = ["--train-iters", "2", "--override-opt_param-scheduler"]
    out = train(
        tmp_path,
        [*RUN, "--load-hf", "in", "--max-position-embeddings", "512", "--save", "a", "--save-hf", "hf_a"],
        [*RUN, "--model", "in", "--load", "a", "--save", "b", "--save-hf", "hf_b", *more],
        [*RUN, "--model", "in", "--load", "converted", "--save-hf", "hf_c"],
    )
    same_model_files(model, tmp_path / "hf_a", max_position_embeddings=512, dtype="float32")
    same_model_files(model, tmp_path / "hf_b", dtype="float32")
    same_model_files(model, tmp_path / "hf_c", dtype="float32")
    for name, positions in (("a", 512), ("b", 64)):
        convert(capsys, tmp_path / name, tmp_path / f"out_{name}")
        same_model_files(model, tmp_path / f"out_{name}", max_position_embeddings=positions, dtype="float32")
    total = sum(p.stat().st_size for p in (tmp_path / "hf_a").rglob("*") if p.is_file())
    count = sum(p.is_file() for p in (tmp_path / "hf_a").rglob("*"))
    line = f"saved a Hugging Face qwen3 model with its tokenizer to hf_a: {count} files, {total:,} bytes"
    assert out[0].count(line) == 1


@pytest.mark.slow
def test_from_random_weights_the_tokenizer_and_its_ids_travel(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory, GPT-2's two files, and another tokenizer beside a --model DIR that has one of its own."""
    fast = tokenizer(tmp_path / "tok", "<end>", "<begin>")
    (tmp_path / "c.txt").write_text(TEXT * 200)
    inner = json.loads((tmp_path / "tok" / "tokenizer.json").read_text())["model"]
    vocabulary = {("<|endoftext|>" if k == "<end>" else k): v for k, v in inner["vocab"].items()}
    (tmp_path / "my-vocab").write_text(json.dumps(vocabulary))
    (tmp_path / "my-merges").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in inner["merges"]))
    (tmp_path / "in").symlink_to(model)
    hf = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tok", "--data-path", "c.txt"]
    pair = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "my-vocab", "--merge-file", "my-merges"]
    out = train(
        tmp_path,
        [*SIZES, *hf, "--save", "a", "--save-hf", "hf_a"],
        [*SIZES, *pair, "--data-path", "c.txt", "--save-hf", "hf_b"],
        [*RUN[1:], "--model", "in", "--split", "1", *hf, "--save-hf", "hf_c"],
        ["--model", "tiny", *RUN, "--save-hf", "hf_d"],
    )
    convert(capsys, tmp_path / "a", tmp_path / "out_a")
    ids = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id, "pad_token_id": None}
    assert ids["eos_token_id"] == 1 and ids["bos_token_id"] == 0
    for name in ("hf_a", "out_a", "hf_c"):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (tmp_path / "tok" / "tokenizer.json").read_bytes()
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == TEMPLATE
        assert not (tmp_path / name / "generation_config.json").exists()
        assert {k: getattr(AutoConfig.from_pretrained(tmp_path / name), k) for k in ids} == ids
        assert GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path / name)).eos_token_id == 1
    read = AutoTokenizer.from_pretrained(tmp_path / "hf_b")
    assert read(TEXT).input_ids == fast(TEXT).input_ids and read.eos_token_id == 1
    assert AutoConfig.from_pretrained(tmp_path / "hf_b").eos_token_id == 1
    assert (tmp_path / "hf_c" / "LICENSE").read_bytes() == b"terms" and not (tmp_path / "hf_c" / "vocab.txt").exists()
    assert "with no tokenizer to hf_d: 2 files" in out[3]


@pytest.mark.slow
def test_the_tokenizer_that_is_exported_is_the_one_that_was_trained_with(model: Path, tmp_path: Path) -> None:
    """The model directory's own, unless another one is named, also where a checkpoint carries one; bytes have none."""
    tokenizer(tmp_path / "tok", "<end>", "<begin>")
    (tmp_path / "c.txt").write_text(TEXT * 200)
    (tmp_path / "in").symlink_to(model)
    text = [*RUN[1:], "--model", "in", "--split", "1", "--data-path", "c.txt"]
    more = ["--train-iters", "2", "--override-opt_param-scheduler"]
    own, bytes_, other, back, named = train(
        tmp_path,
        [*text, "--save", "a", "--save-hf", "hf_own"],
        [*text, "--tokenizer-type", "ByteTokenizer", "--load", "a", *more, "--save-hf", "hf_bytes"],
        [*text, "--tokenizer-model", "tok", "--load", "a", *more, "--save", "b", "--save-hf", "hf_other"],
        [*text, "--load", "b", *more, "--train-iters", "3", "--save-hf", "hf_back"],
        [*text, "--load-hf", "in", "--tokenizer-model", "tok", "--save-hf", "hf_named"],
    )
    for out in (own, back):
        assert "data: tokenizer HuggingFaceTokenizer in (of --model)" in out
    same_model_files(model, tmp_path / "hf_own", dtype="float32")
    for name, folder in (("hf_back", "in"), ("hf_other", "tok"), ("hf_named", "tok")):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (tmp_path / folder / "tokenizer.json").read_bytes()
        assert (tmp_path / name / "vocab.txt").exists() == (folder == "in")
    assert "notice: the model's tokenizer does not travel along: this run trains on bytes" in bytes_
    names = {path.name for path in (tmp_path / "hf_bytes").iterdir()}
    assert "LICENSE" in names and not names & {"tokenizer.json", "vocab.txt", "tokenizer_config.json"}


# Hostile directories


def test_private_files_and_special_files_do_not_travel(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, secret = tmp_path / "in", tmp_path / "secret"
    source.mkdir()
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (source / name).write_bytes((model / name).read_bytes())
    secret.mkdir(mode=0o700)
    for name in ("key", "x.jinja"):
        (secret / name).write_text("SECRET")
    for name in ("tokenizer_secret.json", "vocab.json", "README.md", "tokenizer.model"):
        (source / name).symlink_to(secret / "key")
    (source / "additional_chat_templates").symlink_to(secret)
    (source / "chat_templates").mkdir()
    (source / "chat_templates" / "a.jinja").symlink_to("../../secret/x.jinja")
    (source / "merges.txt").symlink_to("nowhere")
    (source / "vocab.txt").symlink_to("vocab.txt")
    (source / "tokenizer.json").mkdir()
    os.mkfifo(source / "generation_config.json")
    (source / "LICENSE").symlink_to("chat_template.jinja")
    (source / "spiece.model").write_bytes(b"mine")
    (source / "spiece.model").chmod(0o600)
    (source / "train.py").write_text("import os")
    told = convert(capsys, source, tmp_path / "native")
    for name in ("vocab.json", "README.md", "tokenizer.model", "chat_templates/a.jinja"):
        assert f"{source / name} is not copied: it is a link to a file outside" in told
    assert "merges.txt is not copied: cannot read the file: No such file" in told
    assert "tokenizer.json is not copied: cannot read the file: it is a directory" in told
    assert "generation_config.json is not copied: cannot read the file: it is a FIFO" in told
    assert "vocab.txt is not copied" in told
    assert "not copied, as their names are not known: tokenizer_secret.json, train.py" in told
    # What an attacker adds to a checkpoint: files that its checksums do not list, and links
    made = tmp_path / "native" / "iter_0000000"
    (made / "tokenizer.json").symlink_to(secret / "key")
    (made / "vocab.json").write_text("SECRET")
    convert(capsys, tmp_path / "native", tmp_path / "out")
    out = tmp_path / "out"
    written = {"LICENSE", "chat_template.jinja", "config.json", "model.safetensors", "spiece.model"}
    assert {p.name for p in out.rglob("*")} == written
    assert (out / "LICENSE").read_text() == TEMPLATE and not (out / "LICENSE").is_symlink()
    for place in (made, out):
        assert stat.S_IMODE((place / "spiece.model").stat().st_mode) == 0o600
        assert stat.S_IMODE((place / "LICENSE").stat().st_mode) & 0o044
    for path in (*out.rglob("*"), *made.glob("*")):
        if path.is_file() and path.name not in ("tokenizer.json", "vocab.json"):
            assert b"SECRET" not in path.read_bytes()


def test_a_listed_file_that_became_a_link_does_not_travel(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the listed content even: what is behind a link is not the checkpoint's."""
    convert(capsys, model, tmp_path / "native")
    made, elsewhere = tmp_path / "native" / "iter_0000000", tmp_path / "elsewhere"
    (made / "vocab.txt").rename(elsewhere)
    (made / "vocab.txt").symlink_to(elsewhere)
    along = from_checkpoint(made, read_sums(made))
    assert "vocab.txt" not in along.files and "tokenizer.json" in along.files
    assert "it is a link to a file outside" in along.notices[0]


def test_the_hub_s_cache_is_links_to_its_own_blobs(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for folder in (snapshot, blobs, tmp_path / "models--other--name" / "blobs"):
        folder.mkdir(parents=True)
    for number, name in enumerate(("config.json", "tokenizer.json")):
        (blobs / str(number)).write_bytes((model / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "models--other--name" / "blobs" / "7").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../../models--other--name/blobs/7")
    assert set(from_directory(snapshot).files) == {"config.json", "tokenizer.json"}


def test_every_known_name_is_downloaded() -> None:
    others = ("tokenizer.json", "config.json", "merges.txt", "chat_template.jinja", "sentencepiece.bpe.model")
    for name in (*FILES, *others):
        assert is_known(name) and any(fnmatch(name, pattern) for pattern in HUB_PATTERNS), name
    for name in ("tokenizer_secret.json", "../tokenizer.json", "chat_templates/../../x.jinja", "metadata.json", "x.py"):
        assert not is_known(name)
