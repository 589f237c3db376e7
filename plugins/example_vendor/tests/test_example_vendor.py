"""The conformance kit of Hetero-Megatron on this plugin."""

from __future__ import annotations

import json
import subprocess
import sys


def test_conformance() -> None:
    check = ["plugins", "check", "example_vendor", "--json", "--no-speed"]
    done = subprocess.run([sys.executable, "-m", "hetero_megatron.cli.main", *check], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] and report["platform"] == "example_vendor"
    assert {f["kernel"] for f in report["findings"]} == {"platform example_vendor", "swiglu:example_vendor"}
