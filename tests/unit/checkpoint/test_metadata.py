"""A checkpoint whose checksums were made anew is believed no more than any other file: no hole, no file from elsewhere,
no value of another type; refused as damaged, without a traceback or a hang."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hetero_megatron.checkpoint.native import open_checkpoint
from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, tiles
from tests.distributed.checkpoint.test_save_directory import RUN
from tests.support.programs import inside
from tests.support.selection import each
from tests.support.tiny_checkpoint import load, save

SEED, COUNT = int(os.environ.get("SEED", "2026")), int(os.environ.get("N", "30"))
Document = dict[str, Any]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sum_anew(run: Path, step: int, *more: str) -> None:
    """Make the checksums of what is there now, as one who has altered it would; ``more``: further names to list."""
    made = run / f"iter_{step:07d}"
    names = sorted({p.name for p in made.iterdir() if p.is_file() and p.name != "SHA256SUMS"} | set(more))
    lines = [f"{digest(made / n) if (made / n).is_file() else '0' * 64}  {n}\n" for n in names]
    (made / "SHA256SUMS").write_text("".join(lines))
    (run / "latest").write_text(f"{made.name} {digest(made / 'SHA256SUMS')}\n")


def alter(run: Path, step: int, change: Callable[[Document], object]) -> None:
    path = run / f"iter_{step:07d}" / "metadata.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    sum_anew(run, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tmp_path / "run", 1, 1)
    return tmp_path / "run"


def chunk(document: Document, number: int = 0) -> Document:
    found: Document = document["tensors"]["model.matrix"]["chunks"][number]
    return found


HOLES: dict[str, Callable[[Document], object]] = {
    "missing chunk": lambda d: d["tensors"]["model.matrix"]["chunks"].pop(),
    "no chunks": lambda d: d["tensors"]["model.matrix"].update(chunks=[]),
    "short chunk": lambda d: chunk(d).update(sizes=[1, 4]),
    "narrow chunk": lambda d: chunk(d).update(sizes=[2, 3]),
    "overlap": lambda d: chunk(d, 1).update(offsets=[1, 0]),
    "twice the same": lambda d: chunk(d).update(offsets=[2, 0], sizes=[3, 4]),
    "outside": lambda d: chunk(d, 1).update(offsets=[3, 0]),
    "negative": lambda d: chunk(d).update(offsets=[-1, 0]),
    "larger tensor": lambda d: d["tensors"]["model.matrix"].update(shape=[6, 4]),
    "another rank": lambda d: d["tensors"]["model.matrix"].update(shape=[5, 4, 1]),
    "two of one": lambda d: chunk(d, 1).update(key=chunk(d)["key"]),
    "no key": lambda d: chunk(d).update(key="nothing"),
    "swapped keys": lambda d: (lambda a, b: (a.update(key=b["key"]), b.update(key="model.matrix@0,0")))(
        chunk(d), chunk(d, 1)
    ),
    "dtype": lambda d: d["tensors"]["model.matrix"].update(dtype="float32"),
    "integers": lambda d: d["tensors"]["model.matrix"].update(dtype="int64"),
    "no dtype": lambda d: d["tensors"]["model.matrix"].update(dtype="save"),
    "unknown tensor key": lambda d: d["tensors"]["model.matrix"].update(layout="strided"),
    "huge": lambda d: d["tensors"]["model.matrix"].update(shape=[1 << 40, 1 << 40]),
    "many axes": lambda d: d["tensors"]["model.matrix"].update(shape=[1] * 60),
    "absolute file": lambda d: chunk(d).update(file="/etc/passwd"),
    "outer file": lambda d: chunk(d).update(file="../other.safetensors"),
    "not listed": lambda d: chunk(d).update(file="rank_00001.safetensors"),
    "itself": lambda d: chunk(d).update(file="metadata.json"),
    "another step": lambda d: d["state"].update(step=2),
    "step is text": lambda d: d["state"].update(step="1"),
    "step is true": lambda d: d["state"].update(step=True),
    "NaN": lambda d: d["state"].update(seed=float("nan")),
    "infinity": lambda d: d["state"].update(learning_rate={"peak": float("inf")}),
    "no state": lambda d: d.pop("state"),
    "another format": lambda d: d.update(format=2),
    "format is text": lambda d: d.update(format="1"),
    "tensors is a list": lambda d: d.update(tensors=[]),
}


@pytest.mark.parametrize("how", HOLES)
def test_what_it_says_is_proven(how: str, run: Path) -> None:
    alter(run, 1, HOLES[how])
    with pytest.raises(UserError, match="--load.*damaged: (metadata.json|rank_00000.safetensors)"):
        load(run)


TEXTS = ["", "[]", "{", '{"a": ' * 5000, "[" * 200_000, '{"format": ' + "9" * 6000 + "}", '{"format": "\\ud800"}', "\0"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_hurts_readers(text: str, run: Path) -> None:
    (run / "iter_0000001" / "metadata.json").write_text(text)
    sum_anew(run, 1)
    with pytest.raises(UserError, match=r"damaged: metadata\.json"):
        load(run)


@pytest.mark.parametrize("name", ["metadata.json", "rank_00000.safetensors", "SHA256SUMS", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "link out", "device", "circle"])
def test_what_is_no_file_is_refused_at_once(name: str, kind: str, run: Path, tmp_path: Path) -> None:
    path = run / "iter_0000001" / name
    kept = tmp_path / "kept"
    path.rename(kept)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link out": kept, "device": "/dev/zero", "circle": path}[kind])
    if name == "SHA256SUMS" and kind == "link out":
        return  # its content is what `latest` says
    with pytest.raises(UserError, match=f"damaged: {name}"):
        load(run)


@pytest.mark.parametrize("name", ["metadata.json", "rank_00000.safetensors", "SHA256SUMS", "tokenizer.json"])
def test_a_sparse_file_is_refused_before_it_is_read(name: str, run: Path) -> None:
    os.truncate(run / "iter_0000001" / name, 1 << 40)  # takes no space, and hours to read
    with pytest.raises(UserError, match=f"damaged: {name}.* 1,099,511,627,776 bytes"):
        load(run)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "..", "a/b", "a\x85b", ""])
def test_names_are_plain(name: str, run: Path) -> None:
    sum_anew(run, 1, name)
    with pytest.raises(UserError, match="SHA256SUMS is not a list of checksums"):
        load(run)


def test_only_what_is_listed_travels(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    made = run / "iter_0000001"
    (made / "tokenizer_secret.json").symlink_to(tmp_path / "secret")
    (made / "tokenizer_config.json").write_text("{}")
    os.mkfifo(made / "vocab.txt")
    assert load(run) is not None  # which compares what travels


def rewrite(run: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    path = run / "iter_0000001" / "rank_00000.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    sum_anew(run, 1)


FILES: dict[str, Callable[[dict[str, np.ndarray]], object]] = {
    "narrower": lambda t: t.update({"model.matrix@0,0": t["model.matrix@0,0"].astype(np.float32)}),
    "integers": lambda t: t.update({"model.matrix@0,0": t["model.matrix@0,0"].astype(np.int64)}),
    "another shape": lambda t: t.update({"model.matrix@0,0": t["model.matrix@0,0"].reshape(4, 2)}),
    "longer": lambda t: t.update({"model.vector@0": np.zeros(3)}),
    "one more": lambda t: t.update(more=np.zeros(3)),
    "one less": lambda t: t.pop("model.vector@0"),
}


@pytest.mark.parametrize("how", FILES)
def test_files_hold_what_the_metadata_say(how: str, run: Path) -> None:
    rewrite(run, FILES[how])
    with pytest.raises(UserError, match=r"damaged: rank_00000\.safetensors (holds|does not hold)"):
        load(run)


@pytest.mark.parametrize("how", ["no header", "long header", "more at the end", "offsets", "no numbers"])
def test_a_file_that_is_no_safetensors(how: str, run: Path) -> None:
    path = run / "iter_0000001" / "rank_00000.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    if how == "no header":
        content = content[:4]
    elif how == "long header":
        content = struct.pack("<Q", 1 << 62) + content[8:]
    elif how == "more at the end":
        content += b"\0" * 8
    else:
        old, new = (b"[0,64]", b"[8,72]") if how == "offsets" else (b"[0,64]", b'["",0]')
        assert old in content[: 8 + length]
        content = content.replace(old, new)
    path.write_bytes(content)
    sum_anew(run, 1)
    with pytest.raises(UserError, match=r"damaged: rank_00000\.safetensors"):
        load(run)


@each("seed", range(200))
def test_tiles_is_what_counting_says(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 3)))
    boxes, whole = [Box.whole(shape)], Box.whole(shape)
    for _ in range(rng.randint(0, 4) if shape else 0):
        box, axis = boxes.pop(rng.randrange(len(boxes))), rng.randrange(len(shape))
        at = rng.randint(box.lo[axis], box.hi[axis])
        boxes.append(Box(box.lo, (*box.hi[:axis], at, *box.hi[axis + 1 :])))
        boxes.append(Box((*box.lo[:axis], at, *box.lo[axis + 1 :]), box.hi))
    assert tiles(whole, boxes)
    for _ in range(rng.randint(1, 3) if shape else 0):  # move, stretch or repeat some
        i, by = rng.randrange(len(boxes)), tuple(rng.randint(-1, 1) for _ in shape)
        moved = Box(tuple(a + n for a, n in zip(boxes[i].lo, by, strict=True)), boxes[i].hi)
        boxes[i : i + rng.randint(0, 1)] = [moved]
    counts = np.zeros([n + 8 for n in shape], dtype=int)
    for box in boxes:
        if box.size:
            counts[tuple(slice(a + 4, b + 4) for a, b in zip(box.lo, box.hi, strict=True))] += 1
    want = np.zeros_like(counts)
    want[tuple(slice(4, n + 4) for n in shape)] = 1
    assert tiles(whole, boxes) == (counts == want).all()


VALUES = [
    None, True, 0, 1, -1, 2, 10**30, 1 << 62, -(1 << 63), 0.5, float("nan"), float("inf"), -1e308, "", "x", "1",
    "\ud800", "../x", "/dev/zero", "a" * 5000, [], [[]], [1, 2], {}, {"x": 1}, [None], "float32", "fp32",
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in parsed JSON."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate(document: Document, rng: random.Random) -> str:
    found = list(places(document))
    ours = [p for p in found if p[0] is document["state"]] + list(places(document["state"]["optimizer"]))
    container, key = rng.choice(ours if rng.random() < 0.6 else found)
    if rng.random() < 0.2:
        del container[key]
        return f"without {key}"
    container[key] = rng.choice(VALUES)
    return f"{key} = {container[key]!r:.60}"


def numbers(directory: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.slow
def test_random_changes_of_a_real_one_are_refused_or_harmless(tmp_path: Path) -> None:
    """No exception but a refusal, which can be printed."""
    from hetero_megatron.training.saved_state import check_state

    inside([*RUN, "--train-iters", "1", "--save", str(tmp_path / "run")])
    rng, refused = random.Random(SEED), 0
    path = tmp_path / "run" / "iter_0000001" / "metadata.json"
    content = path.read_text()
    for number in range(COUNT):
        document = json.loads(content)
        what = mutate(document, rng)
        path.write_text(json.dumps(document))
        sum_anew(tmp_path / "run", 1)
        try:
            found = open_checkpoint(str(tmp_path / "run"), None)
            assert found is not None
            check_state(found)
        except UserError as error:
            assert "damaged: " in str(error) and str(error).isprintable(), (number, what)
            refused += 1
    assert refused > COUNT / 3


STATES: dict[str, Callable[[Document], object]] = {
    "step of Adam": lambda s: s["optimizer"]["numbers"].update(step=-1.0),
    "part of a step": lambda s: s["optimizer"]["numbers"].update(step=1.5),
    "no step of Adam": lambda s: s["optimizer"].update(numbers={}),
    "another number": lambda s: s["optimizer"]["numbers"].update(beta=1.0),
    "optimizer's name": lambda s: s["optimizer"].update(name=["adam"]),
    "samples": lambda s: s.update(consumed_train_samples=-4),
    "samples in text": lambda s: s.update(consumed_train_samples="4"),
    "dtype": lambda s: s.update(dtype="fp8"),
    "rate": lambda s: s["learning_rate"].update(peak="1"),
    "no peak": lambda s: s["learning_rate"].pop("peak"),
    "style": lambda s: s["learning_rate"].update(style="zigzag"),
    "rate unknown": lambda s: s["learning_rate"].update(slope=1),
    "decay": lambda s: s.update(weight_decay=[]),
    "plan": lambda s: s.update(plan="x"),
    "loss scale": lambda s: s.update(loss_scale={"scale": -1.0, "good_steps": 0, "patience": 2}),
    "stream": lambda s: s.update(data={"streams": [{"sample": 0, "cursor": [-1], "skip": 0, "corpus": [1, 1]}]}),
    "data": lambda s: s.update(data=[1]),
    "missing": lambda s: s.pop("learning_rate"),
    "fingerprint": lambda s: s.update(data_fingerprint=7),
}


@pytest.mark.slow
def test_a_run_refuses_any_state_that_no_run_wrote(tmp_path: Path) -> None:
    """The program itself, in one process: exit code 2 and the place, before anything is trained or written."""
    words = [*RUN, "--train-iters", "3", "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    inside([*words, "--exit-interval", "1"])
    metadata = (tmp_path / "run" / "iter_0000001" / "metadata.json").read_text()
    for how, change in STATES.items():
        (tmp_path / "run" / "iter_0000001" / "metadata.json").write_text(metadata)
        alter(tmp_path / "run", 1, lambda d: change(d["state"]))  # noqa: B023
        _, err = inside(words, code=2)
        assert "the checkpoint is damaged: metadata.json" in err and "Traceback" not in err, (how, err)
    moment = "optimizer.exp_avg_sq.model.norm.weight"
    (tmp_path / "run" / "iter_0000001" / "metadata.json").write_text(metadata)
    path = tmp_path / "run" / "iter_0000001" / "rank_00000.safetensors"
    document = json.loads(metadata)
    tensors = load_file(path)
    for gone in document["tensors"].pop(moment)["chunks"]:
        del tensors[gone["key"]]
    save_file(tensors, path)
    (tmp_path / "run" / "iter_0000001" / "metadata.json").write_text(json.dumps(document))
    sum_anew(tmp_path / "run", 1)
    _, err = inside(words, code=2)
    assert f"holds no complete state of its optimizer: {moment}" in err
    assert numbers(tmp_path / "run") == numbers(tmp_path / "run")[:1]
