#!/usr/bin/env bash
# `make demo`: 4 ranks of this machine, unequal in every way (see plans/demo.yaml), train on the standard library's source.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
exec .venv/bin/torchrun --nproc-per-node 4 pretrain_gpt.py \
    --plan examples/plans/demo.yaml --model tiny --data-path stdlib \
    --train-iters 80 --lr 3e-3 --lr-warmup-iters 10 --lr-decay-style cosine --log-interval 10 --seed 1 --save runs/demo "$@"
