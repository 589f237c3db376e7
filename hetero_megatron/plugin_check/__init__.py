"""`plugins check`: the conformance kit in a supervised process. Only worker.py loads torch.

Here is the protocol between the worker process and its supervisor.
"""

from typing import Any

Event = dict[str, Any]  # a line of JSON on the channel
BROKEN_DEVICE, LOST_CHANNEL = 70, 71  # exit codes of the worker
