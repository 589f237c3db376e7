"""The protocol between the worker process of ``plugins check`` and its supervisor."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]  # a line of JSON on the channel

BROKEN_DEVICE, LOST_CHANNEL = 70, 71  # exit codes of the worker
