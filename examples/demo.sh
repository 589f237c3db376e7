#!/usr/bin/env bash
# `make demo`: a node with two fast chips and two slow ones, emulated on this machine (clusters/demo.yaml), train a small
# model on the standard library's source under a plan that is unequal in every way (plans/demo.yaml).
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
exec $python -m hetero_megatron.cli.main testbed run --cluster examples/clusters/demo.yaml --chips soft -- \
    $python pretrain_gpt.py --cluster examples/clusters/demo.yaml --plan examples/plans/demo.yaml \
    --model tiny --data-path stdlib \
    --train-iters 60 --lr 3e-3 --lr-warmup-iters 10 --lr-decay-style cosine --log-interval 10 --seed 1 --save runs/demo --overwrite-checkpoints "$@"
