"""Megatron's flags about the model."""

from hetero_megatron.cli.flags.flag import count, family, needs, notice, only, refused, switch, value

_DROPOUT_DIFFERS = "0.1 in Megatron; here there is dropout only where it is asked for, as today's models have none"
_ONE = "operators are chosen per chip, not by this flag"
_LOCAL_GRAPHS = needs("--cuda-graph-impl local", harmless=True)

FLAGS = (
    count("--num-layers", None, "decoder layers", most=100_000),
    count("--hidden-size", None, "width of the residual stream", most=2**24),
    count(
        "--ffn-hidden-size", None, "width of the MLP; 4 x hidden, with --swiglu 2/3 of it in steps of 64", most=2**26,
    ),
    count("--num-attention-heads", None, "query heads", most=2**16),
    switch("--group-query-attention", "key-value heads are shared by groups of query heads"),
    count("--num-query-groups", 1, "key-value heads; needs --group-query-attention", most=2**16),
    count("--kv-channels", None, "features per head; hidden / heads", most=2**16),
    count("--seq-length", None, "tokens per sequence", most=2**31 - 1),
    count(
        "--max-position-embeddings",
        None,
        "longest sequence that the model is made for",
        most=2**31 - 1,
        differs="required in Megatron; here it is --seq-length unless given",
    ),
    value(
        "--position-embedding-type",
        str,
        "learned_absolute",
        "how positions enter: learned_absolute or rope",
        choices=("learned_absolute", "rope"),
    ),
    switch("--use-rotary-position-embeddings", "the same as --position-embedding-type rope"),
    switch("--no-position-embedding", "no learned positions; needs --position-embedding-type rope"),
    value("--rotary-base", float, 10000.0, "base of the rotary frequencies", least=1e-3, most=1e18),
    only(
        "--rotary-percent",
        float,
        (1.0,),
        "rotary embedding of a part of the features is not supported",
        "1.0",
        default=1.0,
    ),
    refused("--rotary-interleaved", "rotary embedding of neighbouring features is not supported"),
    refused("--rotary-seq-len-interpolation-factor", "linear interpolation by flag is not supported", nargs=1),
    switch("--use-rope-scaling", "Llama 3.1's stretching of rotary frequencies"),
    value("--rope-scaling-factor", float, 8.0, "its factor; needs --use-rope-scaling", least=1e-3, most=1e9),
    value("--normalization", str, "LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm")),
    value(
        "--norm-epsilon", float, 1e-5, "added under the root of the norm",
        least=1e-30, most=1.0, aliases=("--layernorm-epsilon",),
    ),
    refused("--apply-layernorm-1p", "a norm weight stored as w - 1 is not supported"),
    refused("--apply-residual-connection-post-layernorm", "this residual connection is not supported"),
    refused("--fp32-residual-connection", "the residual stream has the dtype of the model", "fp32 for the whole model"),
    switch("--swiglu", "gated MLP with SiLU"),
    switch("--squared-relu", "MLP with squared ReLU"),
    switch("--openai-gelu", "MLP with the tanh form of GELU (the default here; see --no-bias-gelu-fusion)"),
    switch(
        "--no-bias-gelu-fusion",
        "MLP with exact GELU (Megatron's fused kernel, the default, computes the tanh form)",
    ),
    switch("--disable-bias-linear", "no biases"),
    switch("--add-qkv-bias", "biases of query, key and value only (with --disable-bias-linear)"),
    switch("--qk-layernorm", "norm of queries and keys, per head"),
    switch("--untie-embeddings-and-output-weights", "the output head has weights of its own"),
    notice(
        "--make-vocab-size-divisible-by",
        "the vocabulary is never padded: shards may be unequal",
        nargs=1,
        type=int,
        differs="128 in Megatron; padding would make the model depend on the plan",
    ),
    count("--vocab-size", None, "size of the vocabulary; read from the tokenizer if left out", most=2**31 - 2),
    value("--init-method-std", float, 0.02, "standard deviation of initial weights", least=1e-30, most=1e3),
    refused("--init-method-xavier-uniform", "initial weights are normal", "--init-method-std"),
    value(
        "--attention-dropout", float, 0.0, "probability with which attention probabilities are dropped in training",
        below=1.0,
        least=0.0, differs=_DROPOUT_DIFFERS,
    ),
    value(
        "--hidden-dropout", float, 0.0,
        "probability with which elements of the embeddings, and of what attention and MLP add to the residual stream, "
        "are dropped in training", below=1.0,
        least=0.0, differs=_DROPOUT_DIFFERS,
    ),
    notice("--attention-softmax-in-fp32", "the softmax is always computed in fp32 or better"),
    notice(
        "--apply-query-key-layer-scaling",
        "it cancels out in exact arithmetic; scores are accumulated in fp32 here",
    ),
    value("--window-size", str, None, "sliding window LEFT,RIGHT: LEFT earlier tokens are seen; RIGHT is 0"),
    only(
        "--transformer-impl",
        str,
        ("transformer_engine", "local"),
        "there is one transformer here, for training",
        "leave the flag out",
        says="there is one transformer here",
    ),
    only(
        "--attention-backend",
        str,
        ("auto", "flash", "fused", "unfused", "local"),
        "attention is one operator here; its provider is chosen per chip",
        "leave the flag out",
        says="attention is one operator here",
    ),
    notice("--use-flash-attn", _ONE),
    refused("--spec", "a layer specification in Python cannot be split by a plan", "--model or flags", nargs="*"),
    refused(
        "--multi-latent-attention", "multi-latent attention is not read from flags",
        "--model with a config.json that has it, or a checkpoint with it as SOURCE of convert",
    ),
    count(
        "--mtp-num-layers", 0, "modules that predict further tokens, each with a layer after the last one; of those of "
        "--load-hf, others are left out with a notice", least=0, most=64,
    ),
    value(
        "--mtp-loss-scaling-factor", float, 0.1, "weight of the mean over the modules of their losses, beside the main "
        "loss", least=0.0, most=1e6, needs=needs("--mtp-num-layers"),
    ),
    refused(
        "--heterogeneous-layers-config-path",
        "layers of unlike shapes are not supported (the flag is not about unlike chips)",
        "--plan for unlike chips",
        nargs=1,
    ),
    notice("--use-mcore-models", "there is one model definition here (Megatron ignores it too)"),
    notice("--use-legacy-models", "there is one model definition here"),
    notice("--no-masked-softmax-fusion", _ONE),
    notice("--no-bias-swiglu-fusion", _ONE),
    notice("--no-bias-dropout-fusion", _ONE),
    notice("--no-rope-fusion", _ONE),
    notice("--no-persist-layer-norm", _ONE),
    notice("--cross-entropy-loss-fusion", _ONE),
    notice("--cross-entropy-fusion-impl", _ONE, nargs=1),
    notice("--enable-cuda-graph", "it has another name now, --cuda-graph-impl local"),
    notice("--external-cuda-graph", "Transformer Engine captures nothing here, --cuda-graph-impl local does"),
    value(
        "--cuda-graph-impl",
        str,
        "none",
        "local: run decoder layers as device graphs, one launch for a layer's forward and one for its backward, on "
        "any vendor's device that has graphs; transformer_engine is as none",
        choices=("none", "local", "transformer_engine"),
    ),
    value("--cuda-graph-scope", str, None, "full, which is the default: whole layers", nargs="+", needs=_LOCAL_GRAPHS),
    count("--cuda-graph-warmup-steps", 3, "steps before layers are captured", needs=_LOCAL_GRAPHS),
    notice("--te-rng-tracker", "random numbers are a function of the place, so that no generator has a state"),
    only("--vocab-extra-ids", int, (0,), "ids beyond the tokenizer's are not supported", "0, or leave the flag out"),
    only("--softmax-type", str, ("vanilla",), "this softmax is not supported", "vanilla, or leave the flag out"),
    refused("--window-attn-skip-freq", "layers with and without a sliding window cannot be mixed", nargs=1),
    refused(
        "--embedding-init-method-std", "all initial weights have one deviation", "--init-method-std for all", nargs=1
    ),
    refused("--qk-clip", "only the optimizer changes weights"),
    *family(refused, "--qk-clip-alpha= --qk-clip-threshold=", "only the optimizer changes weights"),
    *family(refused, "--q-lora-rank= --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= "
            "--rotary-scaling-factor= --mscale= --mscale-all-dim= --cache-mla-latents --mla-down-proj-fusion "
            "--rope-type=",
            "multi-latent attention is not read from flags", "--model with a config.json that has it"),
    *family(refused, "--mtp-standalone --mtp-use-repeated-layer --mtp-detach-heads "
            "--mtp-hybrid-override-pattern=", "modules of multi-token prediction are on the last stage, each with a "
            "layer of the last one's kind", "--mtp-num-layers without it; a last stage without layers has them alone"),
    *family(refused, "--experimental-attention-variant= --dsa-indexer-n-heads= --dsa-indexer-head-dim= "
            "--dsa-indexer-topk= --dsa-indexer-topk-freq= --dsa-indexer-skip-topk-offset= --dsa-indexer-loss-coeff= "
            "--dsa-indexer-use-sparse-loss --dsa-kernel-backend= --dsa-indexer-rope-interleaved "
            "--no-dsa-indexer-rotate-activation/--disable-dsa-indexer-rotate-activation "
            "--no-dsa-indexer-scoring-relu/--disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon= "
            "--dsa-indexer-k-norm-fp32 --linear-attention-freq= --linear-conv-kernel-dim= --linear-key-head-dim= "
            "--linear-value-head-dim= --linear-num-key-heads= --linear-num-value-heads= --attention-output-gate",
            "sparse, linear and gated attention are not supported", "softmax attention, with --window-size perhaps"),
    notice("--enable-experimental", "it permits other flags, and each of those is judged by itself"),
    *family(refused, "--is-hybrid-model --hybrid-layer-pattern= --hybrid-override-pattern= --hybrid-attention-ratio= "
            "--hybrid-mlp-ratio= --mamba-state-dim= --mamba-head-dim= --mamba-num-groups= --mamba-num-heads= "
            "--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype= --mamba-inference-conv-states-dtype= "
            "--mamba-inference-ssm-states-dtype=", "state-space layers are said by a configuration, "
            "not by flags", "--model with a config.json of docs/models.md that has them"),
    *family(refused, "--qk-l2-norm", "this norm of queries and keys is not supported", "--qk-layernorm"),
    *family(refused, "--glu-linear-offset= --activation-func-clamp-value= --quick-geglu",
            "this activation is not supported", "--swiglu, --squared-relu or --openai-gelu"),
    *family(refused, "--encoder-num-layers= --decoder-num-layers=", "there is one stack of layers", "--num-layers"),
    *family(refused, "--yarn-original-max-position-embeddings= --yarn-beta-fast= --yarn-beta-slow= "
            "--yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int",
            "YaRN is not read from flags", "--model with a config.json that has it"),
    *family(refused, "--mrope-section=+ --no-rope-freq= --relative-attention-num-buckets= "
            "--relative-attention-max-distance=", "these positions are not supported",
            "--position-embedding-type rope or learned_absolute"),
    *family(refused, "--heterogeneous-layers-config-encoded-json=",
            "layers of unlike shapes are not supported (the flag is not about unlike chips)",
            "--plan for unlike chips"),
    *family(refused, "--yaml-cfg=", "flags are not read from a file", "the flags themselves"),
    *family(refused, "--bert-no-binary-head --onnx-safe= --mask-prob= --short-seq-prob= --mask-type= --mask-factor= "
            "--output-bert-embeddings --bert-embedder-type= --bert-load=", "BERT is not trained", "a GPT model"),
    *family(refused, "--ict-head-size= --biencoder-projection-dim= --biencoder-shared-query-context-model --ict-load= "
            "--titles-data-path= --query-in-block-prob= --use-one-sent-docs --evidence-data-path= "
            "--retriever-report-topk-accuracies=+ --retriever-score-scaling --block-data-path= --embedding-path= "
            "--indexer-batch-size= --indexer-log-interval= --retro-project-dir= --retro-add-retriever "
            "--retro-cyclic-train-iters= --retro-encoder-layers= --retro-encoder-hidden-dropout= "
            "--retro-encoder-attention-dropout= --retro-num-neighbors= --retro-num-retrieved-chunks= "
            "--retro-attention-gate= --retro-no-verify-neighbor-count",
            "retrieval models are not trained", "a GPT model"),
    *family(refused, "--num-classes= --img-h= --img-w= --num-channels= --patch-dim= --classes-fraction= "
            "--data-per-class-fraction= --no-data-sharding --head-lr-mult= --vision-pretraining "
            "--vision-pretraining-type= --vision-backbone-type= --swin-backbone-type= --iter-per-epoch= "
            "--dino-local-img-size= --dino-local-crops-number= --dino-head-hidden-size= --dino-bottleneck-size= "
            "--dino-freeze-last-layer= --dino-norm-last-layer --dino-warmup-teacher-temp= --dino-teacher-temp= "
            "--dino-warmup-teacher-temp-epochs=", "vision models are not trained", "a GPT model"),
    *family(refused, "--logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k= --logits-save-dir= "
            "--logits-save-dtype= --logits-load-dir= --logits-load-decode-threads= --logits-load-prefetch-factor= "
            "--logits-load-msc-prefetch-depth= --logits-load-kd-loss-alpha= --logits-load-ignore-errors",
            "distillation is not supported", "the next token as the only label"),
    *family(refused, "--inference-batch-times-seqlen-threshold= --max-tokens-to-oom= --inference-max-requests= "
            "--inference-max-seq-length= --inference-max-batch-size= --inference-dynamic-batching "
            "--inference-dynamic-batching-buffer-size-gb= "
            "--inference-dynamic-batching-paused-buffer-size-gb= --inference-dynamic-batching-mamba-memory-ratio= "
            "--inference-dynamic-batching-block-size= --inference-dynamic-batching-max-requests= "
            "--inference-dynamic-batching-max-tokens= --inference-dynamic-batching-num-cuda-graphs= "
            "--inference-dynamic-batching-track-paused-request-events "
            "--inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs "
            "--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens= "
            "--inference-dynamic-batching-unified-memory-level= --enable-chunked-prefill --num-speculative-tokens= "
            "--inference-dynamic-batching-prefix-caching/--no-inference-dynamic-batching-prefix-caching "
            "--inference-dynamic-batching-prefix-caching-eviction-policy= "
            "--inference-dynamic-batching-prefix-caching-coordinator-policy= "
            "--inference-dynamic-batching-prefix-caching-routing-alpha= "
            "--inference-dynamic-batching-prefix-caching-mamba-gb= "
            "--inference-dynamic-batching-cuda-graph-mixed-prefill-count= "
            "--inference-dynamic-batching-cuda-graph-sizing-distribution= "
            "--inference-dynamic-batching-sampling-backend= --use-same-sampling-seed-across-dp-ranks "
            "--inference-dynamic-batching-async-sched-mode= --inference-dynamic-batching-logprobs-mode= "
            "--inference-logging-step-interval= "
            "--inference-text-gen-server-logging/--no-inference-text-gen-server-logging "
            "--inference-wandb-logging/--no-inference-wandb-logging --inference-coordinator-port= "
            "--inference-use-synchronous-zmq-collectives/--no-inference-use-synchronous-zmq-collectives "
            "--inference-disable-ep-consensus/--no-inference-disable-ep-consensus --inference-shards= "
            "--inference-cuda-graph-scope= --inference-rng-tracker --inference-fuse-tp-communication "
            "--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend= "
            "--inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type= --flash-decode "
            "--nccl-all-reduce-for-prefill --symmetric-ar-type= --mlp-chunks-for-prefill= --use-legacy-static-engine",
            "this program trains and does not serve", "hetero-megatron convert, and an engine for inference"),
    *family(notice, "--flash-attention-version= --fused-residual-rmsnorm --use-transformer-engine-op-fuser "
            "--use-te-activation-func --use-fused-weighted-squared-relu --batch-invariant-mode "
            "--no-clone-scatter-output-in-embedding/--disable-clone-scatter-output-in-embedding", _ONE),
    *family(notice, "--mlp-chunks-for-training=", "the MLP of a micro-batch is one call"),
    *family(notice, "--cuda-graph-modules=+", "whole layers are captured (--cuda-graph-impl local)"),
    *family(notice, "--config-logger-dir= --test-mode --lazy-mpu-init", "it changes no results"),
)  # fmt: skip
