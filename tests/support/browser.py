"""A headless browser looks at a page: errors, what sticks out, pictures."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """A browser of this machine, or None (apt-get install chromium)."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def look(page: str, width: int, dark: bool, picture: Path | None = None, height: int = 900) -> dict[str, Any]:
    """Open a page in a frame of ``width`` CSS pixels.

    Returns:
        errors: of scripts; wide: elements that stick out of the page at the right; background: its color; height.
    """
    browser = find()
    assert browser is not None
    watch = "<script>window.errors=[];addEventListener('error',e=>errors.push(String(e.message)))</script>"
    inner = page.replace("<head>", f"<head>{watch}", 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "frame.html"
        file.write_text(f"""<!doctype html><meta charset=utf-8>
<style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe id=f width={width} height={height} srcdoc="{html.escape(inner)}"></iframe><script>
const f = document.getElementById('f');
f.onload = () => {{ setTimeout(() => {{
  const w = f.contentWindow, d = w.document, wide = [];
  if (d.documentElement.scrollWidth > w.innerWidth) for (const e of d.body.querySelectorAll('*'))
    if (e.getBoundingClientRect().right > w.innerWidth + 1) wide.push(e.tagName + '.' + e.className);
  const found = {{errors: w.errors, wide, background: w.getComputedStyle(d.body).backgroundColor,
    height: d.documentElement.scrollHeight, canvases: d.querySelectorAll('canvas').length}};
  const out = document.createElement('pre'); out.id = 'found'; out.style.display = 'none';
  out.textContent = JSON.stringify(found);
  document.body.append(out);
}}, 300) }};
</script>""")
        common = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
            f"--user-data-dir={folder}/profile", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=4000", f"--window-size={max(width, 520)},{height}",
        ]  # fmt: skip
        done = subprocess.run([*common, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
        found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', done.stdout, re.DOTALL)
        assert found is not None, done.stderr[-2000:]
        if picture is not None:
            subprocess.run(
                [*common, f"--screenshot={picture}", file.as_uri()], capture_output=True, check=True, timeout=120
            )
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result
