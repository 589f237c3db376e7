"""Megatron's flags about parallelism, FlagScale's about unlike chips, and ours about plans."""

from typing import Any

from hetero_megatron.cli.flags.flag import count, family, needs, notice, only, refused, switch, value
from hetero_megatron.cluster.catalogue import DTYPES
from hetero_megatron.utils.files import parse_json
from hetero_megatron.utils.text import dtype_name

_ALWAYS = "it is always so here"
_RANKS, _MOST = 2**16, 2**31  # ranks; any other number in a list
_MESHES = needs("--hetero-process-meshes")
_CONTEXT = needs("context parallelism")
_PIPELINE = needs("pipeline parallelism", harmless=True)
_EXPERTS = "experts on unlike meshes are divided by a plan file (docs/moe.md), not by flags"
_GROUPS = "groups are of as many micro-batches as there are stages"
_FSDP2, _MEGATRON_FSDP = needs("--use-torch-fsdp2"), needs("--use-megatron-fsdp")
_SHARDING = "weights are divided over the replicas of one pipeline's stages, all alike"
_ONE_LEVEL = "--use-torch-fsdp2, or --data-parallel-sharding-strategy with --use-megatron-fsdp"
_OWN_MEMORY = "memory of what is gathered, and how much travels at once, is the runtime's own affair"
_TRANSPORT = "it changes how messages travel, not results"
_TRANSPORT_SWITCHES = (
    "--no-async-tensor-model-parallel-allreduce", "--no-overlap-p2p-communication",
    "--overlap-p2p-communication-warmup-flush", "--overlap-param-gather-with-optimizer-step",
    "--no-align-param-gather", "--ddp-average-in-collective", "--use-sharp",
    "--defer-embedding-wgrad-compute",
)  # fmt: skip
_MEGATRON_FSDP_DTYPES = (
    "--megatron-fsdp-main-params-dtype", "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype",
)  # fmt: skip
_TRANSPORT_VALUES = ("--nccl-communicator-config-path", "--tp-comm-bootstrap-backend", "--ddp-num-buckets")


def rows(text: str) -> Any:
    """A list of lists in JSON, as FlagScale writes them."""
    lists = parse_json(text, "the value")  # its UserError is a ValueError
    if not isinstance(lists, list) or not lists or not all(isinstance(row, list) for row in lists):
        raise ValueError("not a list of lists")
    if not all(type(number) is int and abs(number) <= _MOST for row in lists for number in row):
        raise ValueError("not integers, or too large")
    return lists


PLAN = (
    value("--plan", str, None, "plan file (YAML or JSON): which ranks hold what"),
    switch("--auto-plan", "search for the best plan on the cluster of --cluster and run it"),
    value("--cluster", str, None, "cluster file that the plan is checked against; needs --plan or --auto-plan",
          needs=needs("--plan", "--auto-plan")),
    switch("--allow-over-memory", "go on where ranks are estimated to need more memory than their chips have",
           needs=needs("--plan", "--auto-plan")),
    value("--model", str, None, "preset, Hugging Face directory or config.json, instead of architecture flags"),
    value("--config", str, None, "flags from a file, by their names (YAML, JSON, TOML); the command line wins"),
    switch("--write-config", "print the flags that count as such a file, with where each came from, then stop"),
    switch("--dry-run", "check and print the plan, then stop"),
    count(
        "--as-rank", None, "with --dry-run: run this rank of the plan alone, with fake tensors", least=0,
        needs=needs("--dry-run"),
    ),
    value(
        "--world-size", int, None, "number of ranks, for --dry-run without torchrun",
        least=1, most=1 << 16, needs=needs("--dry-run"),
    ),
    value(
        "--schedule", str, None,
        "pipeline schedule of a plan that is built from flags: interleaved with virtual stages, else 1f1b if left out",
        choices=("1f1b", "gpipe", "interleaved", "zero-bubble"),
    ),
    value(
        "--dtype",
        dtype_name,
        None,
        "of weights and activations; fp64 is for proofs. --bf16 and --fp16 say the same",
        choices=DTYPES,
    ),
)  # fmt: skip

_GRID = "an encoder and a language model on grids of their own are not supported"
_GRID_FLAGS = (
    "--encoder-tp", "--encoder-dp", "--llm-offset", "--llm-tp", "--llm-cp", "--llm-pp", "--llm-dp", "--llm-ep",
    "--llm-expt-tp",
)  # fmt: skip

FLAGS = (
    count("--tensor-model-parallel-size", 1, "ranks that share every layer", most=_RANKS),
    count("--pipeline-model-parallel-size", 1, "stages", most=_RANKS),
    count("--context-parallel-size", 1, "ranks that divide the tokens of every sequence", most=_RANKS),
    value(
        "--cp-comm-type",
        str,
        None,
        "how these meet in attention: p2p (the default), allgather, a2a (they divide the heads) or a2a+p2p",
        nargs="+",
        needs=needs("context parallelism", harmless=True),
    ),
    value(
        "--hierarchical-context-parallel-sizes",
        int,
        None,
        "for a2a+p2p: ranks that divide the heads, and groups of them that pass keys and values round",
        nargs="+",
        least=1,
        most=_RANKS,
        needs=_CONTEXT,
    ),
    count("--expert-model-parallel-size", 1, "ranks that divide the experts; replicas may share them", most=_RANKS),
    count("--expert-tensor-parallel-size", None, "ranks that share the columns of an expert; as tensor parallel",
          most=_RANKS),
    notice(
        "--sequence-parallel",
        "it is always on where tensor parallelism is",
        differs="off in Megatron; here no two ranks hold copies of one activation",
    ),
    notice(
        "--use-distributed-optimizer",
        "the optimizer is always sharded over replicas",
        differs="off in Megatron; here every weight has exactly one owner",
    ),
    notice("--overlap-grad-reduce", _ALWAYS),
    switch("--overlap-param-gather",
           "layers wait for updated parameters in the next forward, where these need not be unpacked"),
    switch("--tp-sums-in-16-bits",
           "where shares are equal, partial sums of tensor parallelism are added by the device's library, which rounds "
           "to 16 bits after every addition; else in fp32, rounded once"),
    *(notice(name, _TRANSPORT) for name in _TRANSPORT_SWITCHES),
    notice("--no-align-grad-reduce", _TRANSPORT, aliases=("--disable-align-grad-reduce",)),
    *(notice(name, _TRANSPORT, nargs=1) for name in _TRANSPORT_VALUES),
    notice("--tp-comm-overlap", "it needs Transformer Engine and does not change results"),
    count("--num-layers-per-virtual-pipeline-stage", None,
          "layers of a virtual stage; the schedule is interleaved, or as --schedule says", needs=_PIPELINE),
    count("--num-virtual-stages-per-pipeline-rank", None,
          "virtual stages of every stage; the schedule is interleaved, or as --schedule says"),
    refused("--microbatch-group-size-per-virtual-pipeline-stage", _GROUPS, nargs=1),
    count("--decoder-first-pipeline-num-layers", None, "layers of the first stage; the rest is spread evenly", least=0),
    count("--decoder-last-pipeline-num-layers", None, "layers of the last stage; the rest is spread evenly", least=0),
    value("--pipeline-model-parallel-layout", str, None, "layers per stage in Megatron's language, e.g. Et*3|t*4L; "
          "more than there are stages are virtual stages"),
    switch("--account-for-embedding-in-pipeline-split", "count the embedding as one layer", needs=_PIPELINE),
    switch("--account-for-loss-in-pipeline-split", "count the loss as one layer", needs=_PIPELINE),
    value(
        "--distributed-backend",
        str,
        None,
        "backend of torch.distributed; gloo keeps to the CPU",
        differs="nccl in Megatron; here the one that torch names for the device",
    ),
    value(
        "--transport",
        str,
        "auto",
        "between chips of unlike vendors: a backend that reaches both, where their plugins name one, else the bridge "
        "through host memory; bridge: that in any case",
        choices=("auto", "bridge"),
    ),
    value("--distributed-timeout-minutes", float, 10.0, "how long a rank waits for another before the job ends",
        least=1e-3,
          most=1e6),
    switch("--use-tp-pp-dp-mapping", "number the ranks through pipeline before data parallelism"),
    notice("--ddp-bucket-size", "buckets are cut by layers and size in bytes", nargs=1, type=int),
    refused(
        "--standalone-embedding-stage",
        "Megatron has dropped this flag",
        "--pipeline-model-parallel-layout, or a stage with layers: [] in a plan",
    ),
    *(refused(name, _GRID, "a model of one tower", nargs=1) for name in _GRID_FLAGS),
    switch("--use-torch-fsdp2", "replicas divide their weights, which are gathered layer by layer"),
    switch("--torch-fsdp2-no-reshard-after-forward", "what forward has gathered stays until backward", needs=_FSDP2),
    switch("--use-megatron-fsdp", "replicas divide what --data-parallel-sharding-strategy says"),
    only(
        "--num-distributed-optimizer-instances",
        int,
        (1,),
        "every part of the optimizer has one owner",
        "1, or leave the flag out",
    ),
    value(
        "--data-parallel-sharding-strategy", str, None,
        "optim_grads: gradients go to their owners in every micro-batch, and weights are gathered once a step; "
        "optim_grads_params: weights are gathered layer by layer, too; the optimizer is divided in any case",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        needs=needs("--use-megatron-fsdp", harmless=True),
    ),
    value(
        "--kernels",
        str,
        None,
        "providers of operators: PROVIDER, OPERATOR=PROVIDER or PIPELINE.STAGE:OPERATOR=PROVIDER; "
        "a stage's own kernels in the plan come first",
        nargs="+",
    ),
    value("--platform", str, None, "name of the platform to run on, where this machine has several"),
    switch("--compile", "run the layers through torch.compile"),
    value("--compile-backend", str, "inductor", "backend of torch.compile", needs=needs("--compile")),
    *family(refused, "--tensor-parallel-num-weight-shards= --enable-full-sharding-in-hsdp", _SHARDING, _ONE_LEVEL),
    only("--outer-dp-sharding-strategy", str, ("no_shard",), _SHARDING, "no_shard, or leave the flag out"),
    *(only(name, str, ("fp32",), "gradients and masters are kept, and sent, in fp32 or better",
           "fp32, or leave the flag out", needs=_MEGATRON_FSDP) for name in _MEGATRON_FSDP_DTYPES),
    *family(notice, "--fsdp-double-buffer --fsdp-manual-registration --suggested-communication-unit-size= "
            "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
            "--fsdp-db-use-persist-buf-on-alloc-fail", _OWN_MEMORY),
    *family(refused, "--max-seqlen-per-dp-cp-rank= --hybrid-context-parallel",
            "context parallelism is the same for all sequences", "--context-parallel-size, or a plan"),
    *family(refused, "--use-ring-exchange-p2p", "Megatron has dropped this flag"),
    *family(refused, "--fake-process-group", "it has another name here", "--dry-run --as-rank R"),
    *family(notice, "--pipeline-model-parallel-comm-backend= --no-tp-comm-bulk-wgrad/--disable-tp-comm-bulk-wgrad "
            "--no-tp-comm-bulk-dgrad/--disable-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag/--disable-tp-comm-overlap-ag "
            "--no-tp-comm-overlap-rs/--disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad "
            "--no-tp-comm-split-ag/--disable-tp-comm-split-ag --no-tp-comm-split-rs/--disable-tp-comm-split-rs "
            "--tp-comm-overlap-cfg= --delay-wgrad-compute --wgrad-deferral-limit= --disable-gloo-process-groups "
            "--sharp-enabled-group= --high-priority-stream-groups=+ --ddp-pad-buckets-for-high-nccl-busbw "
            "--use-nccl-ub --disable-symmetric-registration --create-all-gather-group "
            "--no-gradient-reduce-div-fusion --no-use-layer-wise-param-layout", _TRANSPORT),
    *family(notice,
            "--ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation=+",
            "gradients are always accumulated and reduced in fp32 or better"),
    *family(refused, "--distributed-timeout-seconds-after-init=", "there is one time limit",
            "--distributed-timeout-minutes"),
    *family(notice, "--flight-recorder-dump-path= --flight-recorder-trace-buffer-size= "
            "--no-flight-recorder-dump-on-timeout/--disable-flight-recorder-dump-on-timeout "
            "--flight-recorder-include-stack-trace "
            "--no-flight-recorder-include-only-active/--disable-flight-recorder-include-only-active "
            "--no-flight-recorder-extra-dump-on-exec/--disable-flight-recorder-extra-dump-on-exec",
            "a rank that waits in vain always says for whom"),
    notice("--local-rank", "torchrun says which rank this is", nargs=1, type=int, aliases=("--local_rank",)),
)  # fmt: skip

HETERO = (
    notice("--enable-hetero", "every plan is of the same kind here; the meshes are given by their own flags"),
    value("--hetero-device-types", str, None, "chip of every mesh, checked at start", nargs="+", needs=_MESHES),
    value(
        "--hetero-current-device-type", str, None, "chip of this rank; must be that of its mesh",
        needs=needs("--hetero-device-types"),
    ),
    count(
        "--hetero-pipeline-layer-split", None, "layers per pipeline stage", nargs="+", least=0, most=_MOST,
        needs=_MESHES,
    ),
    count("--hetero-process-meshes", None, "tp cp ep dp pp of every mesh", nargs="+", least=0, most=_RANKS),
    refused("--expert-tensor-parallel-size-per-process-mesh", _EXPERTS, nargs="+"),
    refused(
        "--hetero-use-cpu-communication",
        "chips of unlike vendors exchange tensors over the bridge through host memory by themselves",
        "--transport bridge, which rules out other ways",
    ),
    notice("--use-partial-reduce-for-shared-embedding", "tied weights are reduced over whatever holders there are"),
    value("--recompute-granularity-per-stage-micro-batch", rows, None, "FlagScale's run-length lists, as JSON",
          needs=_MESHES),
    value("--recompute-method-per-stage-micro-batch", rows, None, "FlagScale's run-length lists, as JSON",
          needs=_MESHES),
    value("--recompute-num-layers-per-stage-micro-batch", rows, None, "FlagScale's run-length lists, as JSON",
          needs=_MESHES),
)
