"""Every figure of README's table of measurements stands in the section of docs/ that its row names."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

from tests.support.paths import ROOT

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
LINK = re.compile(r"\[[^\]]*\]\((docs/[\w/]+\.md)(?:#([\w-]+))?\)")


def rows(readme: str) -> list[list[str]]:
    """The cells of each row of the table below "Measured", without its head."""
    part = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(text: str, wanted: str | None) -> str:
    """From a heading to the next one of its level or above; the whole page without ``wanted``."""
    if wanted is None:
        return text
    headings = list(re.finditer(r"^(#+) (.*)$", text, re.MULTILINE))
    for i, found in enumerate(headings):
        if anchor(found[2]) == wanted:
            ends = (h.start() for h in headings[i + 1 :] if len(h[1]) <= len(found[1]))
            return text[found.start() : next(ends, len(text))]
    raise AssertionError(f"no heading {wanted}")


def numbers(text: str) -> list[Decimal]:
    return [Decimal(found.replace(",", "").rstrip(".")) for found in NUMBER.findall(text)]


def lacking(row: list[str]) -> list[str]:
    """Numbers of a row that no number of its sections is, or is rounded to."""
    links = LINK.findall(row[-1])
    assert links, f"{row[0]}: names no page with its measurement"
    text = "\n".join(section((ROOT / page).read_text(encoding="utf-8"), name or None) for page, name in links)
    known, missing = numbers(text), []
    for figure in NUMBER.findall(" ".join(row[:-1])):
        value = Decimal(figure.replace(",", ""))
        step = Decimal(1).scaleb(int(value.as_tuple().exponent))
        if not any(abs(number - value) <= step / 2 for number in known):
            missing.append(figure)
    return missing


def test_every_figure_stands_where_its_row_says() -> None:
    found = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(found) > 10
    wrong = {row[0]: missing for row in found if (missing := lacking(row))}
    assert wrong == {}


def test_every_row_names_its_command() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for row in rows((ROOT / "README.md").read_text(encoding="utf-8")):
        commands = re.findall(r"`([^`]+)`", row[-1])
        assert commands, row[0]
        for command in commands:
            program = command.split()[0]
            if program == "make":
                assert f"\n{command.split()[1]}:" in makefile, command
                continue
            assert (ROOT / "benchmarks" / program).exists(), command
            pages = [(ROOT / page).read_text(encoding="utf-8") for page, _ in LINK.findall(row[-1])]
            assert any(program in page for page in pages), f"{program} is not named where the figures are"


def test_what_is_measured_again_is_what_rows_claim() -> None:
    """``make bench-readme``: every claim has its row, whose figures are its limits."""
    from benchmarks.bench_readme import CLAIMS, HERE

    found = rows((ROOT / "README.md").read_text(encoding="utf-8"))
    for claim in CLAIMS:
        (row,) = [row for row in found if row[0].startswith(claim.row)]
        figures = numbers(" ".join(row[:-1]))
        assert all(Decimal(limit) in figures for limit in (claim.least, claim.most) if limit is not None), claim
        assert f"`{claim.command[0]}`" in row[-1] and (HERE / claim.command[0]).exists(), claim
        assert claim.least is not None or claim.most is not None


def test_a_figure_that_was_not_measured_is_found(tmp_path: Path) -> None:
    row = ["peak memory of 38 ranks", "1.2 % on average", "[r](docs/results/predictor.md#{})"]
    row[-1] = row[-1].format("peak-memory-of-our-own-runtime-predicted-and-measured")
    assert lacking(row) == []
    assert lacking([row[0], "0.77 % on average", row[-1]]) == ["0.77"]
    assert lacking(["peak memory of 39 ranks in 1,999 plans", *row[1:]]) == ["39", "1,999"]
