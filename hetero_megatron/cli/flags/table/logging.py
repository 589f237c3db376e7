"""Megatron's flags about logs, profiles, exits and faults; and ours about precision alignment."""

from hetero_megatron.cli.flags.flag import count, family, needs, notice, refused, switch, value

_SECONDS = "metrics.jsonl always holds busy, waiting and communication seconds of every rank"
_NOT_LOGGED = "this version does not log it"
_WRITTEN = "it is always written"
_ALWAYS_WRITTEN = (
    "--log-loss-scale-to-tensorboard", "--log-learning-rate-to-tensorboard", "--log-batch-size-to-tensorboard",
    "--no-log-loss-scale-to-tensorboard", "--no-log-learnig-rate-to-tensorboard",  # Megatron's spelling
)  # fmt: skip
_NEVER_WRITTEN = (
    "--log-num-zeros-in-grad", "--log-params-norm", "--log-energy", "--log-max-attention-logit", "--enable-one-logger",
    "--no-one-logger",
)  # fmt: skip
_WITHOUT = "the trace holds steps, actions and transfers"
_PROFILED = needs("--profile", harmless=True)
_BOARD, _WANDB = needs("--tensorboard-dir"), needs("--wandb-project")
_MLFLOW = needs("--mlflow-experiment")
_IN_PLACE = "restarts inside a process are not supported"

FLAGS = (
    count("--log-interval", 100, "steps between lines on the console"),
    value("--log-format", str, "short", "the console line: short fits 120 columns; megatron has Megatron's fields",
          choices=("short", "megatron")),
    switch("--log-kernel-plan", "print a line per operator and stage at start, with what was passed over and why"),
    value("--tensorboard-dir", str, None, "write TensorBoard events there"),
    count("--tensorboard-queue-size", 1000, "events that TensorBoard may hold back", needs=_BOARD),
    count("--tensorboard-log-interval", 1, "steps between TensorBoard events", needs=_BOARD),
    notice("--log-timers-to-tensorboard", _SECONDS),
    switch("--log-validation-ppl-to-tensorboard", "also write the perplexity of evaluations",
           needs=_BOARD + needs("--eval-interval", "--skip-train")),
    notice("--log-memory-to-tensorboard", _NOT_LOGGED),
    notice("--log-world-size-to-tensorboard", "the plan is printed at start"),
    *(notice(name, _WRITTEN) for name in _ALWAYS_WRITTEN),
    *family(notice, "--disable-log-loss-scale-to-tensorboard", _WRITTEN),
    *(notice(name, _NOT_LOGGED) for name in _NEVER_WRITTEN),
    notice("--logging-level", "there is one level", nargs=1),
    notice("--no-barrier-with-level-1-timing", _SECONDS, aliases=("--barrier-with-L1-time",)),
    notice("--log-throughput", "throughput is always logged"),
    notice("--log-progress", "metrics.jsonl is the record of progress"),
    switch(
        "--log-straggler",
        "name ranks that compute 1.5 times as long per step as predicted from calibrated rates, or else as in their "
        "first 20 steps",
    ),
    value(
        "--replan-on-drift", float, None,
        "where a rank computes more than this many times as long as it should: save, stop, and let the launcher "
        "(hetero-megatron run) plan again with what was measured", least=1.05, most=1e6,
    ),
    notice("--timing-log-level", _SECONDS, nargs=1, type=int),
    notice("--timing-log-option", _SECONDS, nargs=1),
    value("--wandb-project", str, None, "log to this Weights & Biases project"),
    value("--wandb-entity", str, None, "owner of the project", needs=_WANDB),
    value("--wandb-exp-name", str, None, "name of the run", needs=_WANDB),
    value("--wandb-save-dir", str, None, "where Weights & Biases keeps its files", needs=_WANDB),
    value("--mlflow-experiment", str, None, "log to a run of this MLflow experiment, which is made if it is not there"),
    value("--mlflow-run-name", str, None, "name of the run", needs=_MLFLOW),
    value("--mlflow-tracking-uri", str, None, "of the server or database (MLFLOW_TRACKING_URI)", needs=_MLFLOW),
    value("--routing-stats", str, None, "at the end, write how often the tokens of this run chose each expert (JSON, "
          "for the planner)"),
    switch("--profile", "write what every rank did, on one clock, as a trace for ui.perfetto.dev: "
           "SAVE/profile/trace.json", needs=needs("--save")),
    count("--profile-step-start", 10, "the first profiled step, counted from 0", least=0, needs=_PROFILED),
    count("--profile-step-end", 12, "the step before which it ends, counted from 0", needs=_PROFILED),
    value("--profile-ranks", int, [0], "ranks whose torch profiler output is written", least=0, most=65_535, nargs="+",
          needs=needs("--use-pytorch-profiler", harmless=True)),
    switch("--use-pytorch-profiler", "also write torch profiler output of --profile-ranks: "
           "SAVE/profile/torch-rank-N.json", needs=_PROFILED),
    switch("--record-memory-history", "record what the allocator of each rank's device does, for torch's viewer "
           "(docs.pytorch.org/memory_viz)"),
    value("--memory-snapshot-path", str, None, "write it there when the run ends, however it does; a file's name gets "
          "the rank's number (default: snapshot.pickle)", needs=needs("--record-memory-history", harmless=True)),
    count("--exit-interval", None, "stop after a step that is a multiple of this"),
    count("--exit-duration-in-mins", None, "stop after so many minutes"),
    switch("--exit-signal-handler", "stop cleanly, on all ranks, when the signal comes"),
    value(
        "--exit-signal",
        str,
        "SIGTERM",
        "that signal",
        choices=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
        needs=needs("--exit-signal-handler"),
    ),
    value("--exit-file", str, None, "stop after the step during which this file appears on the host of any rank, as a "
          "cloud's or a scheduler's notice may leave it; with --elastic that host leaves, and the others go on"),
    refused("--iterations-to-skip", "steps cannot be left out", nargs="+"),
    value(
        "--rerun-mode",
        str,
        "disabled",
        "validate_results: a step that is not finite but is when run again counts; disabled: it ends the run too",
        choices=("disabled", "validate_results"),
        differs="validate_results in Megatron; here a step is run again for diagnosis in either mode",
    ),
    switch(
        "--no-check-for-nan-in-loss-and-grad",
        "skip and count a step whose loss or gradient is not finite, instead of ending the run (fp16 skips a gradient "
        "that overflows without it, too)",
    ),
    switch("--check-for-spiky-loss", "run a step again before it counts where the loss jumps: does hardware err?"),
    refused("--check-for-large-grads", "this check is not built", "--clip-grad, --check-for-spiky-loss"),
    refused("--error-injection-rate", "faults are made by the testbed", "hetero-megatron testbed fault", nargs=1),
    count("--check-weight-hash-across-dp-replicas-interval", None,
          "steps between comparisons of all weights that several ranks hold, by hashes over all their holders; a rank "
          "that differs is named, and ends the run"),
    switch("--elastic", "ranks stay when others are lost or leave, and go on under another plan from what is in their "
           "memories; of hetero-megatron run, which gives this flag to its ranks"),
    count("--peer-replicas-every", 1,
          "steps between copies of each rank's optimizer state in another host's memory, so that a lost host costs at "
          "most so many steps and no checkpoint is read; 0: none; by default none where the cluster file's host_memory "
          "is too small for them", least=0, needs=needs("--elastic")),
    switch("--no-kernel-check", "leave out the check at start of every kernel against its operator's definition"),
    refused("--inprocess-restart", _IN_PLACE, "torchrun --max-restarts"),
    refused("--enable-ft-package", _IN_PLACE, "torchrun --max-restarts"),
    *family(refused, "--inprocess-max-iterations= --inprocess-monitor-thread-interval= "
            "--inprocess-monitor-process-interval= --inprocess-progress-watchdog-interval= "
            "--inprocess-heartbeat-interval= --inprocess-soft-timeout= --inprocess-hard-timeout= "
            "--inprocess-heartbeat-timeout= --inprocess-barrier-timeout= --inprocess-completion-timeout= "
            "--inprocess-last-call-wait= --inprocess-termination-grace-time= --inprocess-granularity= "
            "--inprocess-active-world-size= --inprocess-empty-cuda-cache --calc-ft-timeouts --ft-num-warmup-iters= "
            "--adlr-autoresume --adlr-autoresume-interval=", _IN_PLACE, "torchrun --max-restarts"),
    *family(refused, "--error-injection-type= --fault-injector-ranks= --fault-injector-num-ranks= "
            "--fault-injector-fault-types= --fault-injector-fault-probabilities= --fault-injector-fault-delay= "
            "--fault-injector-delay-start-iteration= --fault-injector-mtti-seconds= --fault-injector-offset-seconds= "
            "--fault-injector-seed=", "faults are made by the testbed", "hetero-megatron testbed fault"),
    *family(refused, "--exit-signal-handler-for-dataloader --exit-signal-handler-for-training",
            "there is one handler for all of a rank", "--exit-signal-handler"),
    *family(refused, "--run-workload-inspector-server --result-rejected-tracker-filename=",
            "this service is not built"),
    *family(notice, "--straggler-ctrlr-port= --straggler-minmax-count= --disable-straggler-on-startup",
            "--log-straggler compares with what was predicted, from the first step on"),
    *family(notice, "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
            "--pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges", _WITHOUT),
    *family(notice, "--one-logger-project= --one-logger-run-name= --one-logger-async --app-tag-run-name= "
            "--app-tag-run-version= --log-memory-interval= --log-device-memory-used", _NOT_LOGGED),
)  # fmt: skip

_WATCHES = needs("--dump-layers", "--capture-operators", "--check-operators")
# What a run writes down so that two platforms can be compared.
ALIGNMENT = (
    value("--dump-layers", str, None, "write output and gradient of each layer there, of the first micro-batch"),
    value("--capture-operators", str, None, "write arguments, results and gradients of operators there"),
    value("--check-operators", str, None, "compare these operators with their definition in fp64, or: all", nargs="+"),
    value("--align-layers", str, None, "only in these modules, e.g. layers.0. layers.3.mlp", nargs="+", needs=_WATCHES),
    count("--align-steps", 1, "watch so many steps, from the first on", needs=_WATCHES),
)
