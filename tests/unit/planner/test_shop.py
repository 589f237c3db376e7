"""What more cards would buy: sets against brute force, clusters with new hosts, the front, bad input."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.cluster.prices import COUNTS, Prices, affordable, read_prices, with_cards
from hetero_megatron.errors import UserError

PRICES = Prices("EUR", {"RTX4090": 1800.0, "RTX3090": 700.0, "L40S": 9000.0}, 2000.0, 4)
DESK = """
version: 1
nodes:
  - {name: desk, chip: RTX3090, chips_per_node: 2}
links:
  inter_node: {bandwidth: 1.2 GB/s, latency: 30 us}
"""


@pytest.fixture
def desk(tmp_path: Path) -> Cluster:
    (tmp_path / "desk.yaml").write_text(DESK)
    return load_cluster(tmp_path / "desk.yaml")


def test_sets_against_brute_force() -> None:
    kinds = ["RTX4090", "RTX3090"]
    for budget in (2700, 3799, 10_000, 25_000):
        wanted = []
        for a, b in product(COUNTS, COUNTS):
            hosts = math.ceil(a / 4) + math.ceil(b / 4)
            cost = 1800 * a + 700 * b + 2000 * hosts
            if 0 < cost <= budget:
                wanted.append((cost, {k: n for k, n in zip(kinds, (a, b), strict=True) if n}))
        found, left = affordable(PRICES, kinds, budget, 1000)
        assert left == 0 and [PRICES.cost(cards) for cards in found] == sorted(cost for cost, _ in wanted)
        assert all((PRICES.cost(cards), cards) in wanted for cards in found)
        few, left = affordable(PRICES, kinds, budget, 3)
        assert few == found[-3:] and left == max(0, len(found) - 3)  # the dearest
    with pytest.raises(UserError, match=r"at least 2700 EUR"):
        affordable(PRICES, kinds, 2699, 20)


def test_new_hosts(desk: Cluster) -> None:
    larger = with_cards(desk, {"RTX4090": 5, "RTX3090": 4}, 4)
    sizes = {group.name: (group.count, group.chips_per_node, group.chip) for group in larger.nodes}
    assert sizes == {
        "desk": (1, 2, "RTX3090"), "new-rtx4090": (1, 4, "RTX4090"), "new-rtx4090-2": (1, 1, "RTX4090"),
        "new-rtx3090": (1, 4, "RTX3090"),
    }  # fmt: skip
    assert larger.ranks[:2] == desk.ranks  # those that are there keep their numbers
    link = larger.link(0, 2)
    assert link is not None and link.bandwidth == 1.2e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("currency: EUR\ncards: {RTX409: 1}", "did you mean RTX4090?"),
        ("currency: EUR\ncards: {RTX4090: 1800 USD}", "every price in EUR"),
        ("currency: EUR\ncards: {RTX4090: -1}", "out of range"),
        ("cards: {RTX4090: 1}", "'currency' is missing"),
        ("currency: EUR\ncards: {RTX4090: 1}\nhosts: 1", "did you mean host?"),
        ("currency: EUR\ncards: [RTX4090]", "a mapping was expected"),
    ],
)
def test_bad_prices(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_prices(path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        ("--teacher-hf", "x"), ("--preference", "dpo"), ("--more-schedules", "always"), ("--objective", "cost"),
        ("--seed", "7"), ("--export", "megatron:x.sh"), ("--time-limit", "5"), ("--no-baselines",), ("--out", "x.yaml"),
    ],
)  # fmt: skip
def test_what_it_knows_nothing_of_is_refused(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "tiny", "--cluster", "c.yaml", "--seq-length", "8", "--global-batch-size", "8",
             "--shop", "RTX4090", "--prices", "p.yaml", "--budget", "1"]  # fmt: skip
    assert main([*words, *more]) == 2
    said = capsys.readouterr().err
    assert f"{more[0]}: --shop plans for many clusters" in said


@pytest.mark.slow
def test_command(desk: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every set is at least as fast as its parts; the front is what no cheaper set beats."""
    (tmp_path / "prices.yaml").write_text("currency: EUR\ncards: {RTX4090: 1800, RTX3090: 700}\nper_host: 4\n")
    words = ["plan", "--model", "tiny", "--cluster", desk.file, "--seq-length", "256", "--global-batch-size", "8",
             "--shop", "RTX4090,RTX3090", "--prices", str(tmp_path / "prices.yaml"), "--budget", "2200"]  # fmt: skip
    assert main([*words, "--json", "--html", str(tmp_path / "shop.html")]) == 0
    offers = json.loads(capsys.readouterr().out)["offers"]
    costs = [offer["cost"] for offer in offers]
    assert costs == [0, 700, 1400, 1800, 2100]
    for offer in offers:
        for other in offers:
            part = all(offer["cards"].get(chip, 0) >= count for chip, count in other["cards"].items())
            assert not part or offer["tokens_per_second"] >= other["tokens_per_second"]
        cheaper = [o["tokens_per_second"] for o in offers if o["cost"] < offer["cost"]]
        assert offer["best"] == (offer["tokens_per_second"] > max(cheaper, default=0))
    assert "3 x RTX3090" in (tmp_path / "shop.html").read_text()
    for more, said in (
        (["--shop", "RTX4090,H100"], "--shop = H100: has no price"), (["--for", "megatron"], "plans for many clusters"),
        (["--budget", "1"], "buys no card"),
    ):  # fmt: skip
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert main(words[:-2]) == 2 and "--budget: missing beside --shop" in capsys.readouterr().err
    (tmp_path / "desk.yaml").write_text(DESK.split("links")[0])
    assert main(words) == 2 and "links.inter_node: missing" in capsys.readouterr().err
