"""``hetero-megatron pretrain`` under the name of Megatron's script. Run it alone (one rank) or under torchrun.

python pretrain_gpt.py --model tiny --mock-data --seq-length 128 --micro-batch-size 2 --train-iters 5 --lr 1e-3
torchrun --nproc-per-node 4 pretrain_gpt.py --plan plan.yaml --model tiny --data-path stdlib ...
"""

import hetero_megatron.environment.interrupt  # noqa: F401  # first

# isort: split
import sys

from hetero_megatron.cli.start import train

if __name__ == "__main__":
    train("pretrain", sys.argv[1:])
