"""Megatron's flags about mixtures of experts."""

from hetero_megatron.cli.flags.flag import count, family, needs, notice, only, refused, switch, value

_WHY = "it is not built"
_REMEDY = "leave the flag out (docs/moe.md says what there is)"
_MODEL = needs("--num-experts", "--model", "--load-hf")
_DROPS = "tokens are never dropped: which ones would be depends on how the batch is divided"
_LEVEL = "--moe-router-load-balancing-type seq_aux_loss, or --moe-router-enable-expert-bias, which level the load"

FLAGS = (
    count("--num-experts", None, "experts in the layers of --moe-layer-freq; needs --swiglu --disable-bias-linear",
          most=2**16),
    value("--moe-layer-freq", str, "1", "which layers have experts: N for every N-th from the first on, or a list of 0 "
          "and 1 for each, such as ([0]*1+[1]*23)", needs=_MODEL),
    count("--moe-router-topk", 2, "experts that each token uses", most=2**16, needs=_MODEL),
    count("--moe-ffn-hidden-size", None, "width of an expert; --ffn-hidden-size", most=2**26, needs=_MODEL),
    count("--moe-shared-expert-intermediate-size", None, "width of an MLP that all tokens use besides", most=2**26,
          needs=_MODEL),
    switch("--moe-shared-expert-gate", "its output is multiplied by the sigmoid of a projection of the token",
           needs=needs("--moe-shared-expert-intermediate-size", "--model", "--load-hf")),
    only("--moe-router-score-function", str, ("softmax", "sigmoid"), "these scores are not built", "softmax, sigmoid",
         default="softmax", needs=_MODEL, summary="of the router's logits, by which experts are chosen"),
    switch("--moe-router-pre-softmax", "softmax over all experts, then the best, not normalised; without it, softmax "
           "over the best", needs=_MODEL),
    count("--moe-router-num-groups", None, "groups of consecutive experts, of which a token uses some", most=2**16,
          needs=needs("--moe-router-group-topk", "--model", "--load-hf")),
    count("--moe-router-group-topk", None, "groups that a token chooses its experts from", most=2**16,
          needs=needs("--moe-router-num-groups", "--model", "--load-hf")),
    value(
        "--moe-router-topk-scaling-factor", float, None, "multiplies the weights of a token's experts",
        least=1e-6, most=1e6, needs=_MODEL,
    ),
    notice("--moe-grouped-gemm", "the products of all experts are always grouped"),
    notice("--moe-token-dispatcher-type", "tokens go by a ragged all-to-all of the ranks that divide the experts, over "
           "the islands of a plan in two hops", nargs=1),
    notice("--moe-shared-expert-overlap", "the shared expert always computes while tokens are on their way"),
    notice("--moe-router-fusion", "the kernel plan says which kernel routes (--log-kernel-plan)"),
    notice("--moe-per-layer-logging", "metrics.jsonl has the load by layer"),
    refused("--moe-router-dtype", "logits are a product in the dtype of the run; scores and weights are in at least "
            "fp32", nargs=1),
    refused("--moe-layer-recompute", "layers are recomputed as wholes", "--recompute-granularity full"),
    only(
        "--moe-router-load-balancing-type", str, ("none", "seq_aux_loss", "aux_loss"),
        "global_aux_loss and sinkhorn need all tokens of a step at once; aux_loss is taken where it is seq_aux_loss: "
        "micro-batches of one sequence, without tensor and context parallelism",
        "seq_aux_loss (of each sequence), or --moe-router-enable-expert-bias (no loss)", default="none",
        differs="aux_loss with a coefficient of 0, which adds nothing",
        summary="what levels the load of experts: a loss of each sequence (a row of the batch), or nothing",
    ),
    value(
        "--moe-aux-loss-coeff", float, None, "coefficient of the loss of --moe-router-load-balancing-type",
        least=0.0, most=1e6,
        needs=needs("--moe-router-load-balancing-type seq_aux_loss", "--moe-router-load-balancing-type aux_loss"),
        differs="0",
    ),
    value(
        "--moe-z-loss-coeff", float, None, "coefficient of the z-loss of the router's logits, e.g. 1e-3",
        least=0.0, most=1e6,
    ),
    switch(
        "--moe-router-enable-expert-bias",
        "after every step, move the router's bias of each expert against its load in the whole step",
    ),
    value(
        "--moe-router-bias-update-rate", float, 1e-3, "by how much the bias moves in a step", least=0.0, most=1e6,
        needs=needs("--moe-router-enable-expert-bias"),
    ),
    *(refused(name, _DROPS, _LEVEL, nargs=1) for name in (
        "--moe-expert-capacity-factor", "--moe-token-drop-policy", "--moe-expert-rank-capacity-factor"
    )),
    refused("--moe-pad-expert-input-to-capacity", _DROPS, _LEVEL),
    *family(
        refused,
        "--use-grouped-gemm-for-shared-expert "
        "--moe-shared-expert-glu-interleave-size= --moe-enable-routing-replay --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8 "
        "--moe-router-quantile-balancing-ema= --moe-router-force-load-balancing --moe-router-force-biased= "
        "--use-grouped-gemm-for-dense-mlp --moe-single-grouped-weight --moe-single-grouped-bias "
        "--moe-input-jitter-eps= --moe-enable-deepep --moe-flex-dispatcher-backend= --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-pad-uneven-dispatch-inputs "
        "--moe-pad-experts-for-cuda-graph-inference "
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
    notice("--moe-permute-fusion", "operators are chosen per chip, not by this flag"),
)
