"""Megatron's flags about mixtures of experts: all refused by name."""

from hetero_megatron.cli.flag import family, notice, refused

_WHY = "a mixture of experts is read from a Hugging Face configuration, not built from flags"
_REMEDY = "--load-hf or --model DIR without these flags, experts divided by a plan file (docs/moe.md)"
_VALUES = (
    "--num-experts",
    "--moe-router-topk",
    "--moe-z-loss-coeff",
    "--moe-ffn-hidden-size",
    "--moe-token-dispatcher-type",
    "--moe-layer-freq",
    "--moe-shared-expert-intermediate-size",
    "--moe-router-dtype",
    "--moe-expert-capacity-factor",
    "--moe-router-score-function",
)
_LISTS = ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff")
_SWITCHES = ("--moe-grouped-gemm", "--moe-router-pre-softmax")

FLAGS = (
    *(refused(name, _WHY, _REMEDY, nargs=1) for name in _VALUES),
    *(refused(name, _WHY, _REMEDY, nargs="+") for name in _LISTS),
    *(refused(name, _WHY, _REMEDY) for name in _SWITCHES),
    *family(
        refused,
        "--moe-shared-expert-gate --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert "
        "--moe-shared-expert-glu-interleave-size= --moe-enable-routing-replay --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8 --moe-router-num-groups= --moe-router-group-topk= "
        "--moe-router-topk-scaling-factor= --moe-router-enable-expert-bias --moe-router-bias-update-rate= "
        "--moe-router-quantile-balancing-ema= --moe-router-force-load-balancing --moe-router-force-biased= "
        "--use-grouped-gemm-for-dense-mlp --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-input-jitter-eps= --moe-enable-deepep --moe-flex-dispatcher-backend= --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-per-layer-logging --moe-pad-expert-input-to-capacity "
        "--moe-pad-experts-for-cuda-graph-inference --moe-token-drop-policy= --moe-layer-recompute --moe-router-fusion "
        "--moe-apply-probs-on-input --moe-latent-size= --moe-flex-dispatcher-num-sms= --moe-deepep-num-sms= "
        "--moe-hybridep-num-sms= --moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute= "
        "--moe-hybridep-num-sms-preprocessing= --moe-ncclep-static-shape --moe-ncclep-zero-copy "
        "--moe-mlp-glu-interleave-size= --moe-expert-rank-capacity-factor= --moe-paged-stash "
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
