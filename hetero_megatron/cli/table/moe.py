"""Megatron's flags about mixtures of experts: those that balance them are supported, the others refused by name."""

from hetero_megatron.cli.flag import family, needs, notice, only, refused, switch, value

_WHY = "a mixture of experts is read from a Hugging Face configuration, not built from flags"
_REMEDY = "--load-hf or --model DIR without these flags, experts divided by a plan file (docs/moe.md)"
_VALUES = (
    "--num-experts",
    "--moe-router-topk",
    "--moe-ffn-hidden-size",
    "--moe-token-dispatcher-type",
    "--moe-layer-freq",
    "--moe-shared-expert-intermediate-size",
    "--moe-router-dtype",
    "--moe-router-score-function",
)
_SWITCHES = ("--moe-grouped-gemm", "--moe-router-pre-softmax")

_DROPS = "tokens are never dropped: which ones would be depends on how the batch is divided"
_LEVEL = "--moe-router-load-balancing-type seq_aux_loss, or --moe-router-enable-expert-bias, which level the load"

FLAGS = (
    only(
        "--moe-router-load-balancing-type", str, ("none", "seq_aux_loss"),
        "aux_loss is of each micro-batch, so another plan would train otherwise; global_aux_loss and sinkhorn need all "
        "tokens of a step at once",
        "seq_aux_loss (of each sequence), or --moe-router-enable-expert-bias (no loss)", default="none",
        differs="aux_loss with a coefficient of 0, which adds nothing",
        summary="what levels the load of experts: a loss of each sequence (a row of the batch), or nothing",
    ),
    value(
        "--moe-aux-loss-coeff", float, None, "coefficient of the loss of --moe-router-load-balancing-type",
        needs=needs("--moe-router-load-balancing-type seq_aux_loss"), differs="0",
    ),
    value("--moe-z-loss-coeff", float, None, "coefficient of the z-loss of the router's logits, e.g. 1e-3"),
    switch(
        "--moe-router-enable-expert-bias",
        "after every step, move the router's bias of each expert against its load in the whole step",
    ),
    value(
        "--moe-router-bias-update-rate", float, 1e-3, "by how much the bias moves in a step",
        needs=needs("--moe-router-enable-expert-bias"),
    ),
    *(refused(name, _DROPS, _LEVEL, nargs=1) for name in (
        "--moe-expert-capacity-factor", "--moe-token-drop-policy", "--moe-expert-rank-capacity-factor"
    )),
    refused("--moe-pad-expert-input-to-capacity", _DROPS, _LEVEL),
    *(refused(name, _WHY, _REMEDY, nargs=1) for name in _VALUES),
    *(refused(name, _WHY, _REMEDY) for name in _SWITCHES),
    *family(
        refused,
        "--moe-shared-expert-gate --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert "
        "--moe-shared-expert-glu-interleave-size= --moe-enable-routing-replay --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8 --moe-router-num-groups= --moe-router-group-topk= "
        "--moe-router-topk-scaling-factor= "
        "--moe-router-quantile-balancing-ema= --moe-router-force-load-balancing --moe-router-force-biased= "
        "--use-grouped-gemm-for-dense-mlp --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-input-jitter-eps= --moe-enable-deepep --moe-flex-dispatcher-backend= --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-per-layer-logging "
        "--moe-pad-experts-for-cuda-graph-inference --moe-layer-recompute --moe-router-fusion "
        "--moe-apply-probs-on-input --moe-latent-size= --moe-flex-dispatcher-num-sms= --moe-deepep-num-sms= "
        "--moe-hybridep-num-sms= --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute= "
        "--moe-hybridep-num-sms-preprocessing= --moe-ncclep-static-shape --moe-ncclep-zero-copy "
        "--moe-mlp-glu-interleave-size= --moe-paged-stash "
        "--moe-paged-stash-page-size= --moe-paged-stash-buffer-size-factor-cuda= "
        "--moe-paged-stash-buffer-size-factor-cpu= --moe-use-upcycling --moe-upcycling-granularity= "
        "--moe-routing-trace-path= --moe-routing-trace-max-training-iters= --moe-routing-trace-capture-logits "
        "--moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights "
        "--overlap-moe-expert-parallel-comm --overlap-dispatch-backward-with-experts-wgrad "
        "--ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream "
        "--expert-tensor-parallel-num-weight-shards= --moe-extended-tp --moe-use-legacy-grouped-gemm",
        _WHY,
        _REMEDY,
    ),
    notice("--moe-permute-fusion", "it concerns mixtures of experts only"),
)
