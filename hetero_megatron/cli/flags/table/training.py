"""Megatron's flags about training, optimizer, learning rate, precision and recompute."""

from hetero_megatron.cli.flags.flag import Flag, count, family, needs, notice, only, refused, switch, value

_FP8 = "fp8 has no such setting in this version"
_ONE_RATE = "all weights have one learning rate"
_SCALED = needs("--dtype fp16", harmless=True)  # launch lines keep these when they change from --fp16 to --bf16
_DYNAMIC = _SCALED + needs("a dynamic loss scale")
_WARMS = needs("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction")
_ADAM = needs("--optimizer adam", "--optimizer muon")
_MUON = needs("--optimizer muon")
_MOST_SEQUENCES = 2**20  # of a step: its micro-batches are actions of the schedule, which are built
_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")

def only_fp32(name: str, nargs: int | str, aliases: tuple[str, ...]) -> Flag:
    """A dtype of the optimizer's, which is fp32 here unless all is fp64."""
    reason = "masters, gradients and moments are kept in fp32 or better"
    return only(name, str, ("fp32",), reason, "fp32, or leave the flag out", nargs=nargs)


TRAINING = (
    count("--micro-batch-size", None, "sequences of a micro-batch", most=_MOST_SEQUENCES),
    count(
        "--global-batch-size", None, "sequences per step; micro-batch size x data parallel if left out",
        most=_MOST_SEQUENCES,
    ),
    count(
        "--rampup-batch-size", None, "START INCREMENT SAMPLES: grow the batch in the first SAMPLES", nargs=3, least=0,
    ),
    count("--train-iters", None, "steps"),
    count("--train-samples", None, "sequences, instead of --train-iters"),
    value(
        "--optimizer", str, "adam", "adam is AdamW; muon: of weight matrices, with AdamW for all others",
        choices=("adam", "sgd", "muon"),
    ),
    value("--lr", float, None, "learning rate after warm-up", least=0.0, most=1e6),
    value(
        "--min-lr", float, 0.0, "learning rate at the end", least=0.0, most=1e6,
        needs=needs("a learning rate that decays", "--min-lr 0.0"),
    ),
    value("--lr-decay-style", str, "linear", "shape of the decay", choices=_STYLES),
    count(
        "--lr-decay-iters", None, "steps until --min-lr; the length of training if left out",
        needs=needs("a learning rate that decays", "--lr-warmup-fraction"),
    ),
    count(
        "--lr-decay-samples", None, "the same in sequences",
        needs=needs("a learning rate that decays", "--lr-warmup-fraction"),
    ),
    value("--lr-warmup-fraction", float, None, "warm-up as a share of the decay", least=0.0, below=1.0),
    count("--lr-warmup-iters", 0, "warm-up in steps", least=0),
    count("--lr-warmup-samples", 0, "warm-up in sequences", least=0),
    value("--lr-warmup-init", float, 0.0, "learning rate at the start of warm-up", least=0.0, most=1e6, needs=_WARMS),
    value(
        "--lr-wsd-decay-style",
        str,
        "exponential",
        "shape of the last part of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=needs("--lr-decay-style WSD"),
    ),
    count("--lr-wsd-decay-iters", None, "steps of the last part of WSD", needs=needs("--lr-decay-style WSD")),
    count("--lr-wsd-decay-samples", None, "the same in sequences", needs=needs("--lr-decay-style WSD")),
    value(
        "--weight-decay", float, 0.01, "decoupled weight decay; biases and norms have none", least=0.0, most=1e6,
        needs=needs("--weight-decay-incr-style constant", harmless=True),
    ),
    value("--start-weight-decay", float, None, "weight decay at the start, where it grows", least=0.0, most=1e6),
    value("--end-weight-decay", float, None, "weight decay at the end, where it grows", least=0.0, most=1e6),
    value(
        "--weight-decay-incr-style",
        str,
        "constant",
        "how weight decay grows",
        choices=("constant", "linear", "cosine"),
    ),
    value("--clip-grad", float, 1.0, "largest norm of the gradient; 0: no clipping", least=0.0, most=1e30),
    value("--adam-beta1", float, 0.9, "decay of the first moment", least=0.0, below=1.0, needs=_ADAM),
    value("--adam-beta2", float, 0.999, "decay of the second moment", least=0.0, below=1.0, needs=_ADAM),
    value("--adam-eps", float, 1e-8, "added to the root of the second moment", least=1e-30, most=1e6, needs=_ADAM),
    value(
        "--sgd-momentum", float, 0.9, "momentum of --optimizer sgd",
        least=0.0, below=1.0, needs=needs("--optimizer sgd"),
    ),
    value("--muon-momentum", float, 0.95, "momentum of matrices", least=0.0, below=1.0, needs=_MUON),
    switch(
        "--muon-nesterov", "the update looks ahead by one step of momentum", aliases=("--muon-use-nesterov",),
        needs=_MUON,
    ),
    count("--muon-num-ns-steps", 5, "Newton-Schulz steps of an update", most=99, needs=_MUON),
    value(
        "--muon-coefficient-type", str, "quintic", "their coefficients: the same ones in each (simple) or five sets",
        choices=("quintic", "simple"), needs=_MUON,
    ),
    value(
        "--muon-scale-mode", str, "spectral",
        "what an update is multiplied by: root of the larger side; of rows / columns; of that, at least 1",
        choices=("spectral", "unit_rms_norm", "shape_scaling"), needs=_MUON,
    ),
    value(
        "--muon-extra-scale-factor", float, None,
        "and by this; if left out 0.2 with spectral, which makes updates as large as AdamW's, else 1", above=0.0,
        most=1e6, differs="1 in Megatron; with 0.2 learning rates are those of AdamW", needs=_MUON,
    ),
    only(
        "--muon-tp-mode", str, ("duplicated", "distributed"),
        "every update is that of the whole matrix, whatever the TP degree", "duplicated, or leave the flag out",
    ),
    only(
        "--muon-scalar-optimizer", str, ("adam",), "all but matrices have AdamW", "adam, or leave the flag out",
    ),
    notice(
        "--muon-fp32-matmul-prec",
        "Newton-Schulz runs in bf16 where weights have 16 bits, else in their own dtype", nargs=1,
    ),
    refused("--muon-no-split-qkv", "Q, K and V are matrices of their own, as in Hugging Face's checkpoints"),
    switch(
        "--override-opt_param-scheduler", "with --load: the flags' learning rate and weight decay count",
        aliases=("--override-opt-param-scheduler",), needs=needs("--load"),
    ),
    switch(
        "--use-checkpoint-opt_param-scheduler", "with --load: those of the checkpoint count",
        aliases=("--use-checkpoint-opt-param-scheduler",), needs=needs("--load"),
    ),
    notice(
        "--calculate-per-token-loss",
        "the loss is always the sum over tokens divided by their number",
        differs="off in Megatron, which averages means of micro-batches; that would depend on the plan",
    ),
    count("--seed", 1234, "of initial weights and of the order of samples", least=0, most=2**63 - 1),
    refused("--decoupled-lr", _ONE_RATE, "--lr", nargs=1),
    refused("--decoupled-min-lr", _ONE_RATE, "--min-lr", nargs=1),
    refused(
        "--optimizer-cpu-offload",
        "a plan says, stage by stage, whose optimizer lives in host memory",
        "optimizer: {offload: true} in stages of a --plan",
    ),
    refused("--use-precision-aware-optimizer", "masters and moments are kept in fp32 or better"),
    notice("--manual-gc", "it changes neither results nor what must fit into memory"),
    notice("--manual-gc-interval", "it changes neither results nor what must fit into memory", nargs=1, type=int),
    notice("--empty-unused-memory-level", "it does not change results", nargs=1, type=int),
    count(
        "--max-logits-mib",
        1024,
        "where a micro-batch's logits on a rank would be more MiB, head and loss go through its tokens in chunks",
        most=2**30,
    ),
    switch("--deterministic-mode",
           "refuse operators that do not give the same bits every time; devices add gradients in the order of ranks"),
    notice("--use-cpu-initialization", "initial weights are always drawn on the CPU, whatever the plan"),
    refused("--data-parallel-random-init", "initial weights never depend on the plan"),
    notice("--no-gradient-accumulation-fusion", "gradients of 16-bit weights are always accumulated in fp32"),
    switch("--skip-train", "only evaluate"),
    count(
        "--eval-iters", 100, "global batches per evaluation; 0: none", least=0,
        needs=needs("--eval-interval", "--skip-train", "--eval-iters 0"),
    ),
    count(
        "--eval-interval",
        None,
        "steps between evaluations; none if left out",
        differs="1000 in Megatron; here nothing is evaluated unless asked for",
        needs=needs("--eval-iters", harmless=True),
    ),
    *family(refused, "--start-eval-at-iter=", "evaluations are by interval", "--eval-interval"),
    *family(refused, "--eval-global-batch-size= --eval-micro-batch-size=", "evaluation has the batches of training"),
    *family(refused, "--step-batch-size-schedule=", "the batch grows evenly", "--rampup-batch-size"),
    *family(refused, "--decrease-batch-size-if-needed", "a plan says how a batch is shared",
            "--global-batch-size that divides, or a plan with unequal shares"),
    *family(refused, "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type=",
            "biases and norms have no weight decay"),
    *family(refused, "--lion-beta1= --lion-beta2=", "there is no such optimizer", "--optimizer adam, sgd or muon"),
    *family(refused,
            "--optimizer-offload-fraction= --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
            "--no-pin-cpu-grads --no-pin-cpu-params",
            "a plan says, stage by stage, whose optimizer lives in host memory",
            "optimizer: {offload: true} in stages of a --plan"),
    notice("--cpu-offloading-retain-pinned-cpu-buffers", "they always serve again"),
    *family(notice, "--min-offloaded-tensor-size=", "all that a layer saves goes, but a few numbers of each token"),
    *family(refused, "--delta-offload-bytes-across-pp-ranks= --activation-offload-fraction=",
            "a plan says, stage by stage, how many layers' activations are in host memory",
            "activations: {offload: {first: n}} in stages of a --plan"),
    refused("--delay-offload-until-cuda-graph", "device graphs and activations in host memory exclude each other"),
    *family(refused, "--freeze-all-layers", "all weights are trained", "--skip-train, which only evaluates"),
    *family(refused, "--no-initialization --init-model-with-meta-device",
            "initial weights are drawn rank by rank, or those of --load-hf or --load"),
    *(flag for names, present_flags in (
        ("--batch-size=", "--micro-batch-size"), ("--warmup=", "--lr-warmup-fraction"),
        ("--model-parallel-size=", "--tensor-model-parallel-size"),
        ("--checkpoint-activations --distribute-checkpointed-activations --checkpoint-num-layers=",
         "--recompute-granularity"),
    ) for flag in family(refused, names, "Megatron has dropped this flag", present_flags)),
    *family(notice, "--no-manual-gc-eval/--disable-manual-gc-eval --train-sync-interval= --optimizer-cuda-graph "
            "--disable-jit-fuser --gpu-sniff-test-interval= --dump-param-to-param-group-map=",
            "it changes neither results nor what must fit into memory"),
    *family(refused, "--use-mup --mup-width-mult= --mup-base-hidden-size= --mup-embedding-mult= --mup-output-mult= "
            "--mup-base-head-dim= --mup-attn-scale-power=",
            "this parametrisation is not supported", "--lr and --init-method-std for this width"),
    *family(refused, "--perform-rl-step --rl-prompts-per-eval= "
            "--rl-generation-lag= --rl-submission-granularity= --rl-consumption-granularity= "
            "--grpo-entropy-term-weight= "
            "--grpo-filter-groups-with-same-reward --langrl-env-config= --rl-default-temperature= --rl-default-top-p= "
            "--rl-default-top-k= --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode= "
            "--rl-persist-cuda-graphs/--no-rl-persist-cuda-graphs --rl-partial-rollouts/--no-rl-partial-rollouts "
            "--rl-inference-logprobs-is-correction/--no-rl-inference-logprobs-is-correction "
            "--rl-importance-sampling-truncation-coef= --rl-use-sequence-packing/--no-rl-use-sequence-packing "
            "--rl-sequence-packing-max-sequences-per-bin= --rl-sequence-packing-algo= "
            "--rl-training-cuda-graphs/--no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size= "
            "--rl-inference-pipeline-model-parallel-size= --rl-inference-expert-model-parallel-size= "
            "--rl-inference-expert-tensor-model-parallel-size= --rl-inference-model-unified-memory-level= "
            "--rl-offload-inference-model-weights-when-idle/--no-rl-offload-inference-model-weights-when-idle "
            "--refit-method= --rl-verify-model-weights-swap/--no-rl-verify-model-weights-swap "
            "--rl-skip-bos-token/--no-rl-skip-bos-token --rl-profile --rl-profile-dir= --rl-inference-parsers=*",
            "of reinforcement learning there is what --grpo does, without this", "hetero-megatron finetune --grpo"),
)  # fmt: skip

PRECISION = (
    switch("--bf16", "bfloat16 weights and activations, fp32 masters and gradients"),
    switch(
        "--fp16", "half precision with loss scaling, fp32 masters and gradients",
        differs="Megatron's learning rate stands still in a step that is skipped; here it is a function of the samples "
        "that were read, skipped ones included, so that a run that goes on needs nothing else to know it",
    ),
    switch("--fp64", "double precision, for proofs"),
    value(
        "--loss-scale", float, None, "constant loss scale of --fp16; dynamic if left out",
        least=1e-30, most=1e30, needs=_SCALED,
    ),
    value(
        "--initial-loss-scale", float, 2.0**32, "dynamic loss scale at the start",
        least=1e-30, most=1e30, needs=_DYNAMIC,
    ),
    value("--min-loss-scale", float, 1.0, "dynamic loss scale at least", least=1e-30, most=1e30, needs=_DYNAMIC),
    count("--loss-scale-window", 1000, "steps without overflow before the loss scale doubles", needs=_DYNAMIC),
    count("--hysteresis", 2, "overflows before the loss scale halves", needs=_DYNAMIC),
    value("--fp8-format", str, None, "linear modules of layers compute in 8-bit floats: e4m3, or hybrid, gradients in "
          "e5m2; weights, masters and all else stay as they are", choices=("e4m3", "hybrid")),
    value("--fp8-recipe", str, None, "scales in fp8: tensorwise, one per weight and per sequence; blockwise, one per "
          "128 or 128 x 128 elements", choices=("tensorwise", "blockwise"), needs=needs("--fp8-format")),
    refused("--fp8-amax-history-len", _FP8, "--fp8-format and --fp8-recipe", nargs=1),
    refused("--fp8-amax-compute-algo", _FP8, "--fp8-format and --fp8-recipe", nargs=1),
    *family(refused, "--fp8-param-gather --fp8-quantizer-factory= --fp8-margin= --fp8-interval= "
            "--no-fp8-wgrad/--disable-fp8-wgrad --fp8-output-proj --first-last-layers-bf16 "
            "--num-layers-at-start-in-bf16= "
            "--num-layers-at-end-in-bf16= --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag "
            "--te-precision-config-file= --kitchen-config-file= --kitchen-recipe-number= --use-kitchen-attention "
            "--kitchen-attention-backend=", _FP8, "--fp8-format and --fp8-recipe"),
    *family(refused, "--fp4-format= --fp4-recipe= --fp4-quantizer-factory= --fp4-param-gather",
            "fp4 is not supported by this version", "--bf16"),
    *family(only_fp32, "--main-grads-dtype= --main-params-dtype= --exp-avg-dtype= --exp-avg-sq-dtype="),
    *family(notice, "--disable-bf16-reduced-precision-matmul",
            "matrix products accumulate in fp32 where the kernel in use says so; the conformance kit checks it"),
    notice("--accumulate-allreduce-grads-in-fp32", "gradients are always accumulated and added up in fp32 or better"),
    switch("--grad-reduce-in-bf16", "gradients travel between ranks in bf16: half the bytes, rounded once for each hop",
           differs="accumulated and added up in bf16 in Megatron; here in fp32, and a rank's own part is not rounded"),
    refused("--fp16-lm-cross-entropy", "the loss is always computed in fp32 or better"),
)  # fmt: skip

RECOMPUTE = (
    value("--recompute-granularity", str, None, "what backward computes again", choices=("full", "selective")),
    value(
        "--recompute-method",
        str,
        None,
        "uniform: all layers, one by one; block: the first layers of a stage",
        choices=("uniform", "block"),
    ),
    switch("--fine-grained-activation-offloading",
           "what layers save for backward is in host memory from their forward to their backward"),
    value("--offload-modules", str, None, "of --fine-grained-activation-offloading: all modules of a layer together",
          nargs="+", needs=needs("--fine-grained-activation-offloading", harmless=True)),
    count("--fine-grained-offloading-max-inflight-offloads", None,
          "layers whose activations may be on their way to or from host memory at once: 1 if left out", most=1 << 16,
          needs=needs("--fine-grained-activation-offloading", harmless=True)),
    count("--cpu-offloading-num-layers", None, "the same as --fine-grained-activation-offloading, of the first layers "
          "of every stage; 0: of none", least=0, most=1 << 16),
    switch("--cpu-offloading", "activations are in host memory, of as many layers as --cpu-offloading-num-layers says"),
    count("--recompute-num-layers", None, "layers of the block method; 1 with uniform"),
    switch("--recompute-activations", "the same as --recompute-granularity selective"),
    only(
        "--recompute-modules",
        str,
        ("core_attn", "layernorm", "mlp_act", "moe_act"),
        "selective recompute covers attention, or the outputs of norms and activations; other modules are recomputed "
        "with their layer",
        "core_attn, or layernorm with mlp_act or moe_act, or --recompute-granularity full",
        nargs="+",
        needs=needs("--recompute-granularity selective", "--recompute-activations"),
    ),
    refused("--distribute-saved-activations", "saved activations stay where they are"),
)
