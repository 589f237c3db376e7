"""Pages as a browser shows them: no error, nothing sticks out on a phone, dark where the screen is dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_megatron.cli.main import main
from tests.support import browser
from tests.unit.training.test_report import run_dir  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.find() is None, reason="no browser here (apt-get install chromium)"),
]
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(21, 24, 28)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    cluster = ["--model", "tiny", "--cluster", "examples/clusters/testbed.yaml"]
    sizes = ["--seq-length", "128", "--global-batch-size", "16", "--dtype", "fp32", "--quiet"]
    plan = ["--out", str(folder / "plan.yaml"), "--compare", "--html", str(folder / "plan.html")]
    assert main(["plan", *cluster, *sizes, *plan]) == 0
    predict = ["--plan", str(folder / "plan.yaml"), "--html", str(folder / "predict.html")]
    assert main(["predict", *cluster[2:], *predict]) == 0
    return {name: (folder / f"{name}.html").read_text() for name in ("plan", "predict")}


def looks_right(page: str, width: int, dark: bool) -> None:
    found = browser.look(page, width, dark)
    assert found["errors"] == [] and found["wide"] == [] and found["canvases"] >= 1
    assert found["background"] == (DARK if dark else LIGHT)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("name", ["plan", "predict"])
def test_pages_of_plans(pages: dict[str, str], name: str, width: int, dark: bool) -> None:
    looks_right(pages[name], width, dark)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
def test_page_of_a_run(run_dir: Path, width: int, dark: bool) -> None:  # noqa: F811
    assert main(["report", str(run_dir)]) == 0
    looks_right((run_dir / "report.html").read_text(), width, dark)


def test_the_browser_finds_errors_and_what_sticks_out() -> None:
    body = "<div style='width:900px' class='x'>a</div><script>nothing.at.all</script>"
    page = f"<html><head></head><body>{body}</body></html>"
    found = browser.look(page, 360, dark=False)
    assert found["errors"] and found["wide"] == ["DIV.x"]
