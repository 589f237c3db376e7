"""FlagCX between chips of unlike vendors, where its torch plugin is installed. None of it has run on a device.

What is stated here is what its sources say (flagos-ai/FlagCX, plugin/torch): importing ``flagcx`` registers the backend
of that name, for the device that it was built for; and so that ranks of unlike devices find each other in the store, it
renames the devices in the store's keys. Chips whose device it does not rename are left out.
"""

from __future__ import annotations

from hetero_megatron.platform.direct import DirectBackend
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1
CUDA = ("nvidia", "amd", "metax", "iluvatar", "hygon", "kunlunxin")  # torch calls the devices of all of them cuda
OTHERS = ("cambricon", "ascend", "mthreads", "tsingmicro")  # mlu, npu, musa, txda


def register(api: PluginApi) -> None:
    api.direct(DirectBackend("flagcx", "flagcx", (*CUDA, *OTHERS)))
