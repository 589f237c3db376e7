"""``python -m hetero_megatron``: the same as the command ``hetero-megatron``."""

import sys

try:
    from hetero_megatron.cli.start import console
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(console())
