"""Train a GPT-family model under a plan; flags are Megatron's. Run it alone (one rank) or under torchrun.

python pretrain_gpt.py --model tiny --mock-data --seq-length 128 --micro-batch-size 2 --train-iters 5 --lr 1e-3
torchrun --nproc-per-node 4 pretrain_gpt.py --plan plan.yaml --model tiny --data-path stdlib ...
"""

import sys

try:
    from hetero_megatron.cli.start import pretrain
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    pretrain()
