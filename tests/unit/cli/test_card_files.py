"""Measured cards: what ``cards contribute`` writes is what predictions take, and what physics forbids is refused."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cli.cards import main
from hetero_megatron.cluster import Cluster, card_entries, catalogue, cluster_from_dict
from hetero_megatron.cluster.card_entries import FACTS, KEYS, REFUSED, measured_card, read_card
from hetero_megatron.cluster.catalogue import CARD_FOLDER, CHIPS
from hetero_megatron.cluster.cluster_file import load_cluster
from hetero_megatron.cluster.rates_section import MODEL_TABLES, TABLES, write_rates
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.card_physics import MOVED, ROWS, check_card
from hetero_megatron.predictor.cost.cost_options import source_of
from hetero_megatron.predictor.cost.rates import NUMBERS, ChipRates, load_rates, model_fingerprint
from hetero_megatron.spec.flops import head_flops, layer_flops
from hetero_megatron.spec.presets import load_model

MEASURED = {
    "when": "2026-11-28", "vendor": "NVIDIA", "hardware": "2 x NVIDIA RTX A6000", "software": "torch 2.11.0+cu130",
    "command": "hetero-megatron calibrate", "shapes": "llama3-8b",
}  # fmt: skip
CHIP, PEAK, MEMORY = "A6000", CHIPS["A6000"].flops["bf16"], CHIPS["A6000"].memory_bandwidth or 0.0
LLAMA = load_model("llama3-8b")
LAYER, HEAD = layer_flops(LLAMA, 2048) / PEAK, head_flops(LLAMA, 2048) / PEAK  # least seconds


def cluster_of(chip: str, **more: Any) -> dict[str, Any]:
    return {"version": 1, "nodes": [{"name": "a", "chip": chip, "chips_per_node": 1}], **more}


def measured_file(folder: Path, rates: dict[str, Any], chip: str = CHIP, dtype: str = "bf16", **facts: Any) -> Path:
    """A cluster file as ``calibrate`` leaves it."""
    section = {"chips": {chip: {dtype: {**rates, "measured": {**MEASURED, **facts}}}}}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster_of(chip, rates=section)))
    return file


def entry(rates: Any, **changes: Any) -> dict[str, Any]:
    one = {"by": "Jane", **MEASURED, "dtype": "bf16", "rates": rates, **changes}
    return {"card": CHIP, "measured": [{key: value for key, value in one.items() if value is not ...}]}


def test_every_file_of_the_folder_is_a_card_within_its_data_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(map(str, CARD_FOLDER.glob("*")))
    assert files and main(["check", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == set(files)
    for one in (one for file in files for one in read_card(Path(file))):
        assert one.card in CHIPS and all(one.facts[fact] for fact in FACTS) and one.told


def test_every_key_is_honoured_harmless_or_refused() -> None:
    assert set(REFUSED) - {"measured"} <= {*NUMBERS, *TABLES}
    assert set(MODEL_TABLES) - set(ROWS) == {"waiting"} and set(MOVED) <= set(NUMBERS)
    for key in NUMBERS:
        if key in REFUSED:
            with pytest.raises(UserError, match=REFUSED[key]):
                card_entries.card_of(document(entry({key: 1e-3})))
        else:
            (one,) = card_entries.card_of(document(entry({key: 1e-3})))
            if key not in MOVED:
                check_card(one)


def document(data: Any) -> Any:
    return card_entries.parse_document(yaml.safe_dump(data), "A6000.yaml")


times = st.floats(1.0, 1e3)  # slower than physics allows
sizes = st.integers(1, 2**14)
def from_zero(most: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(1e-30, most)


numbers = st.fixed_dictionaries({}, optional={
    "gemm_flops": st.floats(1e6, PEAK), "attention_flops": st.floats(1e6, PEAK), "gemm_half": from_zero(1e4),
    "bytes_per_second": st.floats(1e6, MEMORY), "layer_seconds": from_zero(1), "action_seconds": from_zero(1),
    "pack_beta": st.just(0.0) | st.floats(2 / MEMORY, 1), "add_beta": st.floats(3 / MEMORY, 1),
    "jitter": from_zero(1e-3), "step_seconds": from_zero(10), "overhead_bytes": st.integers(0, 2**33),
    "accumulate_beta": from_zero(1e-9), "exchange_seconds": from_zero(1e-2), "message_seconds": st.just(1e-5),
    "spread": st.fixed_dictionaries({}, optional={"layers": from_zero(1), "optimizer": from_zero(1)}),
})  # fmt: skip


def attention_row(length: int, heads: int, x: float, y: float) -> list[float]:
    flops = 4 * heads * 128 * length * (length + 1) / 2  # of all visible pairs
    return [length, heads, 128, x * flops / PEAK, 2 * y * flops / PEAK]


def layer_row(seconds: float) -> Any:
    def make(length: int, rows: int, x: float, y: float) -> list[Any]:
        return [model_fingerprint(LLAMA), 2, rows, 2048, x * seconds * rows / 2, 2 * y * seconds * rows / 2]

    return make


tables = st.fixed_dictionaries({}, optional={
    "attention": st.lists(st.builds(attention_row, sizes, sizes, times, times), max_size=3,
                          unique_by=lambda r: str(r[:3])),
    "gemm": st.lists(st.builds(lambda m, n, x, _: [m, n, 64, x * 128 * m * n / PEAK], sizes, sizes, times, times),
                     max_size=3, unique_by=lambda r: str(r[:3])),
    "optimizer": st.lists(st.builds(lambda n, x: [n, x * n * 28 / MEMORY], sizes, times), max_size=2,
                          unique_by=lambda r: r[0]),
    **{table: st.lists(st.builds(layer_row(least), sizes, sizes, times, times), max_size=2, unique_by=lambda r: r[2])
       for table, least in (("layers", LAYER), ("head", HEAD), ("split_layers", LAYER), ("waiting", LAYER))},
})  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(numbers, tables)
def test_what_is_contributed_is_what_predictions_take(numbers: dict[str, Any], tables: dict[str, Any]) -> None:
    given_rates = {**numbers, **tables}
    kept = {key: value for key, value in given_rates.items() if key not in REFUSED}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        file, out = measured_file(folder, given_rates), folder / "A6000.yaml"
        words = ["contribute", str(file), "--as", CHIP, "--by", "Jane Doe", "--out", str(out), "--json"]
        if not kept:
            with pytest.raises(UserError, match="no rates"):
                main(words)
            return
        assert main(words) == 0
        (one,) = read_card(out)
        assert (one.by, one.facts, one.dtype, one.rates) == ("Jane Doe", MEASURED, "bf16", kept)
        if any(value != [] for value in kept.values()):
            with pytest.raises(UserError, match="measured twice in bf16, before by Jane Doe, 2026-11-28"):
                main(words)
        patch.setattr(catalogue, "CARD_FOLDER", folder)
        measured_card.cache_clear()
        plain = cluster_from_dict(cluster_of(CHIP))
        own = load_cluster(file).rates["chips"][CHIP]["bf16"]
        has = {key: value for key, value in own.items() if key not in REFUSED}
        section = {"chips": {CHIP: {"bf16": has}}}
        found, told = rates_of(plain), rates_of(cluster_from_dict(cluster_of(CHIP, rates=section)))
        measured_card.cache_clear()
    half = found.gemm_half if "gemm_half" not in kept else told.gemm_half  # of a cluster file's rate it is 0
    assert found == replace(told, calibrated=False, gemm_half=half)
    assert not found.calibrated


def rates_of(cluster: Cluster, dtype: str = "bf16") -> ChipRates:
    (found,) = load_rates(cluster, dtype).chips.values()
    return found


def test_predictions_take_what_was_measured_then_the_data_sheet() -> None:
    plain = cluster_from_dict(cluster_of("H200-SXM"))
    found = rates_of(plain)
    assert (found.gemm_flops, found.bytes_per_second, found.gemm_half) == (731e12, 4.06e12, 300)
    assert found.attention[0] == (16384, 32, 128, 3.427e-3, 10.19e-3) and not found.calibrated
    assert "gemm_flops, attention measured by Hetero-Megatron, 2026-11-28; else ml-eng" in source_of(
        plain.chips["H200-SXM"], "bf16"
    )
    half = rates_of(plain, "fp16")
    assert (half.gemm_flops, half.bytes_per_second, half.attention) == (989e12 * 0.803, 4.06e12, ())
    own = {"tflops": {"bf16": 900, "fp16": 900}}  # not the catalogue's chip
    assert rates_of(cluster_from_dict(cluster_of("H200-SXM", chips={"H200-SXM": own}))).gemm_flops == 900e12 * 0.803
    for rates, expected in (({"gemm_flops": 5e14}, (5e14, 0, 2)), ({"step_seconds": 1.0}, (731e12, 300, 2))):
        chips = {"chips": {"H200-SXM": {"bf16": rates}}}
        calibrated = rates_of(cluster_from_dict(cluster_of("H200-SXM", rates=chips)))
        got = calibrated.gemm_flops, calibrated.gemm_half, len(calibrated.attention)
        assert got == expected and calibrated.calibrated and calibrated.bytes_per_second == 4.06e12
    emulated = {"emulate": {"speed": 1.0}}
    assert rates_of(cluster_from_dict(cluster_of("H200-SXM", chips={"H200-SXM": emulated}))).gemm_flops == 5e10


TOO_FAST = {
    "gemm_flops": 1.06 * PEAK, "attention_flops": 1.06 * PEAK, "bytes_per_second": 1.06 * MEMORY,
    "pack_beta": 1.8 / MEMORY, "add_beta": 2.8 / MEMORY, "unpack_beta": 1.8 / MEMORY,
    "gemm": [[4096, 4096, 4096, 0.9 * 2 * 4096**3 / PEAK]],
    "attention": [[2048, 32, 128, 1.0, 0.9 * 4 * 4096 * 2048**2 / PEAK]],
    "optimizer": [[1 << 21, 0.9 * 28 * (1 << 21) / MEMORY]],
    "layers": [[model_fingerprint(LLAMA), 1, 1, 2048, 0.9 * LAYER, 2 * LAYER]],
    "head": [[model_fingerprint(LLAMA), 1, 1, 2048, HEAD, 1.8 * HEAD]],
    "split_layers": [[model_fingerprint(LLAMA), 2, 4, 2048, 1.8 * LAYER, 1.8 * LAYER]],
}  # fmt: skip


def test_what_physics_forbids_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_megatron.cli.main import main as console

    out = tmp_path / "A6000.yaml"
    words = ["cards", "contribute", str(tmp_path / "cluster.yaml"), "--as", CHIP, "--by", "me", "--out", str(out)]
    for key, value in TOO_FAST.items():
        measured_file(tmp_path, {key: value})
        assert console(words) == 2, key
        told = capsys.readouterr().err
        assert f"rates.chips.A6000.bf16.{key}" in told and "which physics forbids" in told and "and 5 %" in told, told
        assert told.count("\n") == 1 and not out.exists()
    slow = {"gemm_flops": 1.04 * PEAK, "bytes_per_second": 1.04 * MEMORY}  # boards boost
    measured_file(tmp_path, slow)
    assert console(words) == 0


def test_rates_that_are_not_of_such_a_card_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_megatron.cli.main import main as console

    rates, words = {"gemm_flops": 1e14}, ["--as", CHIP, "--by", "me", "--out", str(tmp_path / "A6000.yaml")]
    file = measured_file(tmp_path, rates)
    good = yaml.safe_load(file.read_text())

    def refused(said: str, document: Any, words: list[str] = words) -> None:
        file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        assert console(["cards", "contribute", str(file), *words]) == 2, said
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1, (said, told)

    def with_facts(**changes: Any) -> Any:
        facts = {key: value for key, value in {**MEASURED, **changes}.items() if value is not ...}
        return {**good, "rates": {"chips": {CHIP: {"bf16": {**rates, "measured": facts}}}}}

    for vendor in ("cpu", "emulated", "AMD", "nvidia"):
        refused("not measured on A6000, which is of NVIDIA", with_facts(vendor=vendor))
    refused("measured on an emulated chip", {**good, "chips": {CHIP: {"emulate": {"speed": 1.0}}}})
    for fact in FACTS:
        refused(f"measured.{fact}: a fact is missing", with_facts(**{fact: ...}))
    refused("no date", with_facts(when="28.11.2026"))
    refused("no date", with_facts(when="2026-02-30"))
    refused("unknown key 'hardwar' (did you mean hardware?)", with_facts(hardwar="x"))
    refused("a word was expected", with_facts(software=["torch"]))
    section = good["rates"]["chips"][CHIP]
    refused("does not say on what, when and how", {**good, "rates": {"chips": {CHIP: {"bf16": rates}}}})
    refused("no such dtype (did you mean bf16?)", {**good, "rates": {"chips": {CHIP: {"bf1": section["bf16"]}}}})
    refused("says nothing of fp64", {**good, "rates": {"chips": {CHIP: {"fp64": section["bf16"]}}}})
    refused("holds no rates of a chip", cluster_of(CHIP))
    refused("holds no rates of a chip", {"chips": {}})
    refused("no such card (did you mean A6000?)", good, ["--as", "A600", "--by", "me"])
    refused("the file has rates of A6000", good, ["--as", "A10G", "--by", "me"])
    refused("--by", good, ["--as", CHIP])
    refused("--as", good, ["--by", "me"])
    refused("--by = : is empty", good, ["--as", CHIP, "--by", ""])
    refused("a file is called as its card", good, ["--as", CHIP, "--by", "me", "--out", str(tmp_path / "T4.yaml")])
    of_others = {"layers": [["0123456789ab", 1, 1, 128, 1.0, 2.0]], "measured": MEASURED}
    refused("of a model whose FLOPs nobody can check", {"chips": {CHIP: {"bf16": of_others}}})
    for number in (-1e14, 0.0, True, "fast", [1e14], {"a": 1}):
        odd = {**section["bf16"], "gemm_flops": number}
        refused("gemm_flops", {"chips": {CHIP: {"bf16": odd}}})
    refused(".inf is not finite", yaml.safe_dump(good).replace("100000000000000.0", ".inf"))
    (tmp_path / "A6000.yaml").write_text(yaml.safe_dump({"card": "T4", "measured": []}))
    refused("the file is of another card than A6000", good)


def test_hostile_entries_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_megatron.cli.main import main as console

    file, good = tmp_path / "A6000.yaml", entry({"gemm_flops": 1e14})
    two = {**good, "measured": 2 * good["measured"]}
    twice = {"gemm": [[64, 64, 64, 1.0], [64.0, 64, 64, 2.0]]}
    deep: Any = 1.0
    for _ in range(40):
        deep = [deep]
    for said, data in (
        ("the file is empty", ""), ("a mapping was expected", "- 1"), ("key 'measured' is missing", {"card": CHIP}),
        ("unknown key 'mesured' (did you mean measured?)", {**good, "mesured": []}),
        ("no such card (did you mean A6000?)", {**good, "card": "A60000"}),
        ("a word was expected", {**good, "card": 4}),
        ("a list was expected", {**good, "measured": {}}), ("no measurement", {**good, "measured": []}),
        ("unknown key 'dtyp' (did you mean dtype?)", entry({"gemm_flops": 1e14}, dtyp="bf16")),
        ("unknown choice", entry({"gemm_flops": 1e14}, dtype="int4")), ("no rates", entry({})),
        ("a mapping was expected", entry([1])),
        ("unknown key 'gemm_flop' (did you mean gemm_flops?)", entry({"gemm_flop": 1})),
        ("measured twice in bf16", two), ("measured twice in bf16", entry(twice)),
        ("the key is written twice", yaml.safe_dump(good) + "card: A6000\n"),
        ("lists of 4 values", entry({"gemm": [[1, 2, 3]]})), ("a list was expected", entry({"gemm": 3})),
        ("a list was expected", entry({"gemm": [3]})), ("out of range", entry({"gemm_flops": 1e31})),
        ("out of range", entry({"gemm": [[-64, 64, 64, 1.0]]})),
        ("which physics forbids", entry({"gemm": [[10**30, 10**30, 1, 1e-30]]})),
        ("a number of 5,000 digits", yaml.safe_dump(good).replace("100000000000000.0", "9" * 5000)),
        ("nested too deeply", entry({"gemm": deep})), ("the facts stand beside the rates", entry({"measured": {}})),
        ("not of a card", entry({"message_seconds": 0})), ("unknown key 'x'", entry({"spread": {"x": 1}})),
        ("not a name", entry({"gemm_flops": 1e14}, note="x" * 300)),
        ("key 'by' is missing", entry({"gemm_flops": 1}, by=...)),
        ("unknown key 'gemm_backward'", entry({"gemm_backward": []})),
        ("not measured on", entry({"gemm_flops": 1e14}, vendor="cpu")),
    ):  # fmt: skip
        file.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        assert console(["cards", "check", str(file)]) == 2, said
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1, (said, told)
    file.write_text(yaml.safe_dump(good))
    assert console(["cards", "check", str(file)]) == 0
    file.rename(tmp_path / "T4.yaml")
    assert console(["cards", "check", str(tmp_path / "T4.yaml")]) == 2
    assert console(["cards", "check", str(file)]) == 2  # it is not there
    assert console(["cards", "show", CHIP, "--by", "me"]) == 2
    assert "is of contribute only" in capsys.readouterr().err
    assert set(KEYS) == {"by", *FACTS, "source", "note", "dtype", "rates"}


def test_a_file_of_a_card_keeps_its_comments_and_gets_other_rates(tmp_path: Path) -> None:
    out = tmp_path / "A6000.yaml"
    words = ["--as", CHIP, "--by", "me", "--out", str(out), "--json"]
    assert main(["contribute", str(measured_file(tmp_path, {"gemm_flops": 1e14})), *words]) == 0
    out.write_text("# of the lab\n" + out.read_text())
    assert main(["contribute", str(measured_file(tmp_path, {"gemm_flops": 1e14}, dtype="fp16")), *words]) == 0
    assert out.read_text().startswith("# of the lab\n") and [one.dtype for one in read_card(out)] == ["bf16", "fp16"]


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster_of("A6000")))
    names = ["12e345678901", "123456789012", "1e5"]
    layers = [[name, 1, 1, 128, 0.1, 0.2] for name in names]
    write_rates(file, {"chips": {"A6000": {"bf16": {"layers": layers}}}}, file)
    assert [row.fingerprint for row in rates_of(load_cluster(file)).layers] == names
