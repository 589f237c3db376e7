"""``hetero-megatron preprocess`` under the name of Megatron's tool: JSON lines -> .bin/.idx."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hetero_megatron.cli.preprocess import program

if __name__ == "__main__":
    sys.exit(program())
