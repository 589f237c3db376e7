"""Directories that are ambiguous, contradict themselves or are hostile: what transformers loads, or a refusal."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box
from hetero_megatron.spec import load_model, logical_tensors
from tests.distributed.checkpoint.test_hf_load import MODELS
from tests.support.hf_reference import hf_to_logical, make_hf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def tensors(seed: int, name: str = "llama") -> Tensors:
    model, _ = make_hf(MODELS[name], seed, torch.float32)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By name: a directory with only config.json, and two sets of weights."""
    found: dict[str, Any] = {}
    for name in ("llama", "llama tied", "gpt2"):
        model, _ = make_hf(MODELS[name], 1, torch.float32)
        directory = tmp_path_factory.mktemp("config")
        model.config.save_pretrained(directory)  # type: ignore[operator, union-attr]
        found[name] = directory, tensors(1, name), tensors(2, name)
    return found


def put(directory: Path, form: str, weights: Tensors) -> None:
    """In one of the four forms; two shards, by turns."""
    if form == SINGLE:
        save_file(weights, directory / form, {"format": "pt"})
    elif form == BIN:
        torch.save(weights, directory / form)
    else:
        stem, suffix = form.removesuffix(".index.json").rsplit(".", 1)
        names, where = sorted(weights), {}
        for i in range(2):
            file, part = f"{stem}-{i + 1:05d}-of-00002.{suffix}", {n: weights[n] for n in names[i::2]}
            put_file(directory / file, part)
            where |= dict.fromkeys(part, file)
        (directory / form).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))


def put_file(path: Path, weights: Tensors) -> None:
    if path.suffix == ".bin":
        torch.save(weights, path)
    else:
        save_file(weights, path, {"format": "pt"})


def edit_index(directory: Path, change: Callable[[dict[str, Any]], Any], form: str = INDEX) -> None:
    index = json.loads((directory / form).read_text())
    change(index)
    (directory / form).write_text(json.dumps(index))


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def swap(where: dict[str, str], name: str) -> None:
    where[name] = next(f for f in sorted(set(where.values())) if f != where[name])


def read_all(directory: Path) -> Tensors:
    spec = load_model(str(directory))
    weights = HFWeights(str(directory), spec)
    return {t.name: weights.read(t, Box.whole(t.shape)) for t in logical_tensors(spec)}


# The same choice as transformers


def both(first: str, second: str) -> Callable[[Path, Tensors, Tensors], None]:
    def build(directory: Path, old: Tensors, new: Tensors) -> None:
        put(directory, first, old)
        put(directory, second, new)

    return build


def changed(change: Callable[[dict[str, Any]], Any], form: str = INDEX) -> Callable[[Path, Tensors, Tensors], None]:
    def build(directory: Path, old: Tensors, new: Tensors) -> None:
        put(directory, form, new)
        edit_index(directory, change, form)

    return build


def variants(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, INDEX, new)
    save_file(old, directory / "model.fp16.safetensors")
    save_file(old, directory / "model-00003-of-00003.safetensors")
    save_file({"a": torch.zeros(1)}, directory / "adapter_model.safetensors")
    save_file(old, directory / "consolidated.safetensors")


def twice_equal(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, INDEX, new)
    for file in sorted(directory.glob("*.safetensors")):
        part = load_file(file)
        save_file(part | {NORM: new[NORM].clone()}, file, {"format": "pt"})


def equal_head(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, SINGLE, new | {HEAD: new[EMBEDDING].clone()})


def head_only(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, SINGLE, {(HEAD if n == EMBEDDING else n): t for n, t in new.items()})


def head_in_index_only(directory: Path, old: Tensors, new: Tensors) -> None:
    changed(lambda index: index["weight_map"].update({HEAD: index["weight_map"][EMBEDDING]}))(directory, old, new)


ALIKE: dict[str, tuple[str, Callable[[Path, Tensors, Tensors], None]]] = {
    "one file, and an index of others": ("llama", both(INDEX, SINGLE)),
    "safetensors and .bin": ("gpt2", both(BIN, SINGLE)),
    "an index of safetensors, and a .bin": ("llama", both(BIN, INDEX)),
    "two indices": ("llama", both(BIN_INDEX, INDEX)),
    ".bin, and an index of others": ("llama", both(BIN_INDEX, BIN)),
    "one file, and a broken index": ("llama", lambda d, a, b: [put(d, SINGLE, b), (d / INDEX).write_text("[]")]),
    "not in the index": ("llama", changed(lambda index: index["weight_map"].pop(NORM))),
    "not in the .bin index": ("llama", changed(lambda index: index["weight_map"].pop(NORM), BIN_INDEX)),
    "in another shard than the index says": ("llama", changed(lambda index: swap(index["weight_map"], NORM))),
    "total_size is wrong": ("llama", changed(lambda index: index["metadata"].update(total_size=10**30))),
    "a tensor that is nowhere": ("llama tied", head_in_index_only),
    "variants, shards and adapters that nothing names": ("llama", variants),
    "twice, with equal values": ("llama", twice_equal),
    "tied, and an equal head": ("llama tied", equal_head),
    "tied, and only the head": ("llama tied", head_only),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_the_weights_are_those_that_transformers_loads(kind: str, models: dict[str, Any], tmp_path: Path) -> None:
    name, build = ALIKE[kind]
    config, old, new = models[name]
    shutil.copytree(config, tmp_path, dirs_exist_ok=True)
    build(tmp_path, old, new)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    want = hf_to_logical(model, load_model(str(tmp_path)))
    found = read_all(tmp_path)
    assert found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)


def test_files_that_are_not_read_and_an_index_that_errs_are_told(models: dict[str, Any], tmp_path: Path) -> None:
    config, old, new = models["llama"]
    shutil.copytree(config, tmp_path, dirs_exist_ok=True)
    both(INDEX, SINGLE)(tmp_path, old, new)
    (notice,) = HFWeights(str(tmp_path), load_model(str(tmp_path))).notices
    assert f"{SINGLE} is read, and not model-00001-of-00002.safetensors" in notice and INDEX in notice
    (tmp_path / SINGLE).unlink()
    edit_index(tmp_path, lambda index: [index["weight_map"].pop(HEAD), swap(index["weight_map"], NORM)])
    wrong, omitted = HFWeights(str(tmp_path), load_model(str(tmp_path))).notices
    assert f"{INDEX} names other files for {NORM}: they are read from model-0000" in wrong
    assert f"{INDEX} does not name {HEAD}: they are read from model-0000" in omitted


# Refused, where nobody can know or transformers would draw weights at random


def other_head(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, SINGLE, new | {HEAD: old[EMBEDDING]})


def twice_unequal(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, INDEX, new)
    for i, file in enumerate(sorted(directory.glob("*.safetensors"))):
        save_file(load_file(file) | {NORM: (old, new)[i][NORM]}, file, {"format": "pt"})


def beside(name: str) -> Callable[[Path, Tensors, Tensors], None]:
    return lambda d, old, new: [put(d, SINGLE, new), (d / name).write_text("{}")]


def linked(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, INDEX, new)
    shard = sorted(directory.glob("*.safetensors"))[0]
    elsewhere = directory.parent / f"{directory.name}_elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)


def outside(name: str) -> Callable[[Path, Tensors, Tensors], None]:
    return changed(lambda index: index["weight_map"].update({NORM: name}))


def lost_shard(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, BIN_INDEX, new)
    (directory / "pytorch_model-00002-of-00002.bin").unlink()


def lost_tensor(directory: Path, old: Tensors, new: Tensors) -> None:
    put(directory, INDEX, new)
    for file in directory.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if n != NORM}, file)


REFUSED: dict[str, tuple[str, Callable[[Path, Tensors, Tensors], Any], list[str]]] = {
    "tied, and another head": ("llama tied", other_head, [HEAD, EMBEDDING, "tied"]),
    "untied, and no head": (
        "llama", lambda d, a, b: put(d, SINGLE, {n: t for n, t in b.items() if n != HEAD}), [f"missing {HEAD}", "tied"],
    ),
    "twice, with other values": ("llama", twice_unequal, [NORM, "model-00001-of-00002", "model-00002-of-00002"]),
    "an adapter": ("llama", beside("adapter_config.json"), ["adapter_config.json", SINGLE]),
    "a distributed save": (
        "llama", beside("shard-00001-model-00001-of-00001.safetensors"), ["shard-00001-model-00001", SINGLE],
    ),
    "only a variant": ("llama", lambda d, a, b: save_file(b, d / "model.fp16.safetensors"), ["model.fp16", SINGLE]),
    "a shard that is missing": ("llama", lost_shard, [BIN_INDEX, "pytorch_model-00002-of-00002.bin", "No such file"]),
    "a tensor that is missing": ("llama", lost_tensor, [f"missing {NORM}", INDEX, "model-0000"]),
    "an index without files": ("llama", changed(lambda index: index["weight_map"].clear()), [INDEX]),
    "an index of numbers": ("llama", changed(lambda index: index["weight_map"].update({NORM: 3})), [INDEX]),
    "a file above": ("llama", outside("../model.safetensors"), ["../model.safetensors", "outside", INDEX]),
    "an absolute file": ("llama", outside("/etc/passwd"), ["/etc/passwd", "outside", INDEX]),
    "a link out": ("llama", linked, ["model-00001-of-00002", "link", "outside", INDEX]),
    "shapes of another model": ("gpt2", lambda d, a, b: put(d, SINGLE, tensors(1)), ["does not fit", "missing"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_contradictions_are_refused_and_both_are_named(kind: str, models: dict[str, Any], tmp_path: Path) -> None:
    name, build, says = REFUSED[kind]
    config, old, new = models[name]
    shutil.copytree(config, tmp_path / "model")
    build(tmp_path / "model", old, new)
    with pytest.raises(UserError) as caught:
        read_all(tmp_path / "model")
    assert caught.value.field == "--load-hf" and all(word in str(caught.value) for word in says), caught.value


# Hostile files: never a traceback, a hang, or a library's own words


@pytest.fixture
def llama(models: dict[str, Any], tmp_path: Path) -> tuple[Path, Tensors]:
    shutil.copytree(models["llama"][0], tmp_path / "model")
    return tmp_path / "model", models["llama"][2]


def refusal(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_all(directory)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 1500
    assert not any(word in text for word in ("Error", "weights_only", "add_safe_globals", "trust_remote"))
    return text


@pytest.mark.parametrize("form", [SINGLE, INDEX, BIN, BIN_INDEX, "model-00001-of-00002.safetensors"])
def test_only_regular_files_are_opened(form: str, llama: tuple[Path, Tensors]) -> None:
    directory, weights = llama
    if form.startswith("model-"):
        put(directory, INDEX, weights)
    path = directory / form
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert form in refusal(directory)
    path.unlink()
    path.mkdir()
    assert form in refusal(directory)
    for target in ("/dev/zero", "nowhere", form):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        assert form in refusal(directory)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"weight_map": ' + '{"a": ' * 1_000 + "1" + "}" * 1_001,
        '{"metadata": {"total_size": ' + "9" * 5_000 + '}, "weight_map": {"a": "b.safetensors"}}',
        '{"weight_map": {"\\ud800": "b.safetensors"}}',
        '{"weight_map": {"a": "\\ud800.safetensors"}}',
        '{"weight_map": {"a": "b\\u0000.safetensors"}}',
        '{"weight_map": {"a": "\\u001b[31m.safetensors"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "' + "b" * 5_000 + '"}}',
        '{"weight_map": "model.safetensors"}',
        "\ufeff{}",
        "",
    ],
)  # fmt: skip
def test_hostile_indices_are_refused(text: str, llama: tuple[Path, Tensors]) -> None:
    directory, _ = llama
    for form in (INDEX, BIN_INDEX):
        (directory / form).write_text(text)
        assert form in refusal(directory)
        (directory / form).unlink()


def header(name: str = "a", shape: Any = (2,), offsets: Any = (0, 8), dtype: str = "F32") -> dict[str, Any]:
    return {name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("head", "length", "says"),
    [
        (header(), 1 << 62, "ends inside its header"),
        (header(), None, "not a whole safetensors file ("),
        (header(offsets=[0, 0]), None, "header is damaged"),
        (header() | header("b", offsets=[4, 12]), None, "not a whole"),
        (header(shape=[-2]), None, "not a whole"),
        (header(shape=[1 << 63, 1 << 63]), None, "not a whole"),
        (
            header(EMBEDDING, shape=[(1 << 64) - 1, 0], offsets=[0, 0]),
            None,
            f"{EMBEDDING} is [18446744073709551615, 0]",
        ),
        (header("\ud800", offsets=[0, 0], shape=[0]), None, "header is damaged"),
        (header(shape=list(range(100_000)), offsets=[0, 0]), None, ""),
        ({"a": 1}, None, "header is damaged"),
        ([], None, "header is damaged"),
    ],
)
def test_hostile_safetensors_are_refused(head: Any, length: int | None, says: str, llama: tuple[Path, Tensors]) -> None:
    directory, _ = llama
    text = json.dumps(head).encode()
    (directory / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)
    assert says in refusal(directory)


def test_names_in_files_do_not_steer_the_terminal(llama: tuple[Path, Tensors]) -> None:
    directory, weights = llama
    put(directory, SINGLE, weights | {"\x1b[31m": torch.zeros(1), "n" * 5_000: torch.zeros(1)})
    assert "unexpected \\x1b[31m; unexpected nnn" in refusal(directory)


def test_a_pointer_of_git_lfs_is_named(llama: tuple[Path, Tensors]) -> None:
    directory, _ = llama
    (directory / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "it is a pointer of Git LFS" in refusal(directory)


def archive(content: bytes, compression: int = zipfile.ZIP_STORED, twice: bool = False) -> bytes:
    """As torch writes it, with a pickle of our own."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as made:
        for name, data in [("m/data.pkl", content), ("m/version", b"3\n"), ("m/byteorder", b"little")]:
            made.writestr(name, data)
        if twice:
            with pytest.warns(UserWarning, match="Duplicate name"):
                made.writestr("m/data.pkl", content)
    return out.getvalue()


def saved(content: Any, legacy: bool = False) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def edited(content: Any, old: bytes, new: bytes) -> bytes:
    """With other bytes in its pickle, and right checksums."""
    out, before = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved(content)))
    with zipfile.ZipFile(out, "w") as made:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new)
            made.writestr(name, data)
    return out.getvalue()


PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "integer keys": (lambda: saved({1: torch.zeros(2)}), "it has the key 1"),
    "nested": (lambda: saved({"model": {NORM: torch.zeros(2)}}), "model is no tensor"),
    "a list": (lambda: saved([torch.zeros(2)]), "no dictionary"),
    "numbers": (lambda: saved({"epoch": 3}), "epoch is no tensor"),
    "sparse": (lambda: saved({NORM: torch.zeros(2).to_sparse()}), "_rebuild_sparse_tensor"),
    "meta": (lambda: saved({NORM: torch.zeros(2, device="meta")}), "_rebuild_meta_tensor_no_storage"),
    "quantized": (lambda: saved({NORM: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)}), "qtensor"),
    "old and nested": (lambda: saved({"model": {}}, legacy=True), "model is no tensor"),
    "a module": (lambda: saved(torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear"),
    "an old module": (lambda: saved(torch.nn.Linear(2, 2), legacy=True), "torch.nn.modules.linear.Linear"),
    "a function": (lambda: saved({"a": print}), "print"),
    "a surrogate": (lambda: saved({"\ud800": torch.zeros(2)}), "surrogate"),
    "a terabyte": (lambda: archive(b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\1\x85R."), "bytearray"),
    "deep": (lambda: archive(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."), ""),
    "compressed": (lambda: archive(pickle.dumps({}, 2) + b"\0" * (1 << 20), zipfile.ZIP_DEFLATED), "compressed"),
    "two pickles": (lambda: archive(pickle.dumps({}, 2), twice=True), "archive is damaged"),
    "cut off": (lambda: saved({NORM: torch.zeros(2)})[:-80], "archive is damaged"),
    "a wide view": (
        lambda: edited({NORM: torch.zeros(2)}, b"K\2\x85", b"M\xff\xff\x85"), "damaged",
    ),
    "text": (lambda: b"hello", "damaged"),
    "empty": (lambda: b"", "damaged"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", PICKLES)
def test_hostile_pickles_are_refused(kind: str, llama: tuple[Path, Tensors]) -> None:
    directory, _ = llama
    make, says = PICKLES[kind]
    (directory / BIN).write_bytes(make())
    text = refusal(directory)
    assert "cannot be read: not a f" in text or "cannot be read: not a d" in text or "lone surrogate" in text
    assert says in text


def test_views_and_parameters_of_a_pickle_are_read(llama: tuple[Path, Tensors]) -> None:
    """Transposed, shared, and as old versions of torch wrote them."""
    directory, weights = llama
    views: Tensors = {n: t.T.contiguous().T if t.dim() == 2 else torch.nn.Parameter(t) for n, t in weights.items()}
    for legacy in (False, True):
        (directory / BIN).write_bytes(saved(views, legacy))
        found = read_all(directory)
        assert all(torch.equal(found[n], t) for n, t in weights.items())


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("form", [SINGLE, BIN])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    form: str, dtype: torch.dtype, llama: tuple[Path, Tensors]
) -> None:
    directory, weights = llama
    put(directory, form, weights | {NORM: weights[NORM].to(dtype)})
    said = refusal(directory)
    assert f"{NORM} has dtype" in said and ("are quantised" in said) == (dtype.itemsize == 1 and dtype != torch.bool)


@pytest.mark.parametrize("beside", ["qweight qzeros scales", "weight weight.absmax", "weight weight_scale_inv"])
def test_quantised_weights_are_called_so(beside: str, llama: tuple[Path, Tensors]) -> None:
    """Of GPTQ, bitsandbytes and in fp8, where no quantization_config says it."""
    directory, weights = llama
    layer = "model.layers.0.self_attn.q_proj"
    others = {n: t for n, t in weights.items() if n != f"{layer}.weight"}
    packed = {f"{layer}.{name}": torch.zeros(3, 3, dtype=torch.int32) for name in beside.split()}
    put(directory, SINGLE, others | packed)
    (directory / "quantize_config.json").write_text('{"bits": 4}')
    assert "the weights are quantised" in refusal(directory)


# What can be done with files that are not read


OTHER_FILES: dict[str, tuple[Callable[[Path, Tensors], Any], list[str]]] = {
    "GGUF": (lambda d, w: (d / "model-Q4.gguf").write_text("GGUF"), ["it holds model-Q4.gguf", "gguf_file=FILE"]),
    "shards alone": (lambda d, w: [put(d, INDEX, w), (d / INDEX).unlink()], ["read with their model.safetensors.ind"]),
    "one variant": (lambda d, w: save_file(w, d / "model.fp16.safetensors"), ["is called model.safetensors"]),
    "a trainer's state": (
        lambda d, w: torch.save({"model": w, "step": 3}, d / BIN), ["torch.save of what is under 'model' alone"],
    ),
    "a whole model": (
        lambda d, w: torch.save(torch.nn.Linear(1, 1), d / BIN), ["nn.modules.linear.Linear", "save_pretrained(NEW)"],
    ),
    "an adapter beside": (
        lambda d, w: [put(d, SINGLE, w), (d / "adapter_config.json").write_text("{}")], ["adapter as --load-adapter"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_a_refusal_says_what_can_be_done(kind: str, llama: tuple[Path, Tensors]) -> None:
    directory, weights = llama
    write, says = OTHER_FILES[kind]
    write(directory, weights)
    message = refusal(directory)
    assert not [word for word in says if word not in message], message
