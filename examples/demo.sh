#!/usr/bin/env bash
# `make demo`: a node with two fast chips and two slow ones, emulated on this machine (clusters/demo.yaml), train a small
# model on the standard library's source under a plan that is unequal in every way (plans/demo.yaml). On a machine with
# one core the chips are half as fast. Links are shaped by the kernel where it can, else by the ranks; what it was is said.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
cluster=examples/clusters/demo.yaml
cores=$($python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
if [ "$cores" -lt 2 ]; then
    cluster=examples/clusters/demo_one_core.yaml
    echo "demo: one core: chips half as fast ($cluster)" >&2
fi
$python -m hetero_megatron.cli.main testbed run --cluster $cluster --chips soft -- \
    $python pretrain_gpt.py --cluster $cluster --plan examples/plans/demo.yaml \
    --model tiny --data-path stdlib \
    --train-iters 60 --lr 3e-3 --lr-warmup-iters 10 --lr-decay-style cosine --log-interval 10 --seed 1 --save runs/demo --overwrite-checkpoints "$@"
$python -m hetero_megatron.cli.main report runs/demo > /dev/null
echo "what happened, as a page: file://$PWD/runs/demo/report.html"
