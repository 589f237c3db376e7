"""Megatron's flags about mixtures of experts: all refused by name."""

from hetero_megatron.cli.flag import notice, refused

_WHY = "mixture-of-experts models are not supported by this version"
_REMEDY = "a dense model without --num-experts and --moe-* flags"
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
    notice("--moe-permute-fusion", "it concerns mixtures of experts only"),
)
