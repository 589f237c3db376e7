"""Take a picture of a page with a headless browser.

    python tools/screenshot.py PAGE.html OUT.png [WIDTH [HEIGHT [dark]]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.browser import find, look


def main(words: list[str]) -> int:
    if len(words) < 2 or find() is None:
        print(__doc__ if len(words) < 2 else "screenshot: no browser here (apt-get install chromium)", file=sys.stderr)
        return 2
    width, height = (int(words[i]) if len(words) > i else default for i, default in ((2, 1100), (3, 900)))
    look(Path(words[0]).read_text(encoding="utf-8"), width, "dark" in words[4:], Path(words[1]).absolute(), height)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
