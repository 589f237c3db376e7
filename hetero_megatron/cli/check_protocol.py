"""What the process that checks a plugin and the one that watches it agree on."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]  # a line of JSON on the channel

BROKEN_DEVICE, LOST_CHANNEL = 70, 71  # exit codes of the worker
