"""Train a GPT-family model under a plan; flags are Megatron's. Run it alone (one rank) or under torchrun.

python pretrain_gpt.py --model tiny --mock-data --seq-length 128 --micro-batch-size 2 --train-iters 5 --lr 1e-3
torchrun --nproc-per-node 4 pretrain_gpt.py --plan plan.yaml --model tiny --data-path stdlib ...
"""

import os
import sys

from hetero_megatron.cli.pretrain import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may still be dropping tensors, and one that asks for the interpreter's lock while it
    # shuts down aborts the process ("terminate called without an active exception").
    os._exit(code)
