"""Train a GPT-family model under a plan; flags are Megatron's. Run it alone (one rank) or under torchrun.

python pretrain_gpt.py --model tiny --mock-data --seq-length 128 --micro-batch-size 2 --train-iters 5 --lr 1e-3
torchrun --nproc-per-node 4 pretrain_gpt.py --plan plan.yaml --model tiny --data-path stdlib ...
"""

import sys

from hetero_megatron.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
