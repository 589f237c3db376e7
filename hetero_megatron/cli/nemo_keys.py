"""Every key that a launch line of NeMo may override: the flags that it stands for, or why it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.utils.foreign_keys import KeyTable, by_reason

# NeMo's name -> the flag's, where the last parts differ.
NAMES = {
    "trainer.max_steps": "train_iters", "model.encoder_seq_length": "seq_length", "model.optim.lr": "lr",
    "model.optim.sched.min_lr": "min_lr", "model.optim.sched.warmup_steps": "lr_warmup_iters",
    "model.optim.sched.warmup_ratio": "lr_warmup_fraction", "model.optim.sched.max_steps": "lr_decay_iters",
    "model.optim.weight_decay": "weight_decay", "model.optim.eps": "adam_eps", "model.optim.momentum": "sgd_momentum",
    "model.data.data_prefix": "data_path", "model.data.splits_string": "split",
    "model.data.seq_length": "seq_length", "trainer.gradient_clip_val": "clip_grad",
    "trainer.val_check_interval": "eval_interval", "trainer.limit_val_batches": "eval_iters",
    "trainer.log_every_n_steps": "log_interval", "model.layernorm_epsilon": "norm_epsilon",
    "model.tokenizer.model": "tokenizer_model", "model.tokenizer.type": "tokenizer_type",
    "model.data.index_mapping_dir": "data_cache_path", "model.num_moe_experts": "num_experts",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers",
    "model.rotary_percentage": "rotary_percent", "model.nccl_communicator_config_path": "nccl_communicator_config_path",
    "model.seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "model.virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "model.native_amp_init_scale": "initial_loss_scale", "model.native_amp_growth_interval": "loss_scale_window",
    "model.use_flash_attention": "use_flash_attn", "model.ub_tp_comm_overlap": "tp_comm_overlap",
    "optim.lr_scheduler.warmup_steps": "lr_warmup_iters", "optim.lr_scheduler.max_steps": "lr_decay_iters",
    "data.paths": "data_path",
}  # fmt: skip
RANKS = ("trainer.devices", "trainer.num_nodes")
# Parts of the configuration, of NeMo 1 and 2, in which a key with the name of a flag is that flag.
SECTIONS = (
    "trainer", "model", "model.optim", "model.optim.sched", "model.data", "model.tokenizer", "model.config", "data",
    "optim", "optim.config", "optim.lr_scheduler", "trainer.strategy", "trainer.strategy.ddp",
)  # fmt: skip
# Read together with others, see nemo_launch.
JOINT = (
    "model.num_query_groups", "model.optim.betas", "model.fp8", "model.fp8_e4m3", "model.fp8_hybrid",
    "model.bias_activation_fusion", "model.bias_gelu_fusion", "model.tokenizer.library",
)  # fmt: skip
# Keys with two values, which a variable of the script may hold.
SWITCHES = ("model.fp8", "model.fp8_e4m3", "model.fp8_hybrid", "model.bias_activation_fusion", "model.bias_gelu_fusion")
# Key -> the switch without which it says nothing.
BESIDE = dict.fromkeys(
    ("model.fp8_margin", "model.fp8_interval", "model.fp8_amax_history_len", "model.fp8_amax_compute_algo",
     "model.fp8_wgrad", "model.fp8_dot_product_attention", "model.fp8_multi_head_attention"), "model.fp8",
) | dict.fromkeys(
    ("model.cpu_offloading_num_layers", "model.cpu_offloading_activations", "model.cpu_offloading_weights"),
    "model.cpu_offloading",
)  # fmt: skip
_NOTHING: tuple[str, ...] = ()
_BF16, _FP16, _ADAM = ("--bf16",), ("--fp16",), ("--optimizer", "adam")
_PRECISIONS = {
    "bf16": _BF16, "bf16-mixed": _BF16, "bf16-true": _BF16, "16": _FP16, "16-mixed": _FP16, "16-true": _FP16,
    "fp16": _FP16, "32": _NOTHING, "32-true": _NOTHING, "fp32": _NOTHING,
}  # fmt: skip
# Key -> value -> the flags that it stands for; a value in lower case.
CHOICES: Mapping[str, Mapping[Any, tuple[str, ...]]] = {
    "model.bias": {True: _NOTHING, False: ("--disable-bias-linear",)},
    "model.share_embeddings_and_output_weights": {
        True: _NOTHING, False: ("--untie-embeddings-and-output-weights",),
    },
    "model.activation": {
        "gelu": _NOTHING, "openai-gelu": ("--openai-gelu",), "swiglu": ("--swiglu",), "fast-swiglu": ("--swiglu",),
        "squared-relu": ("--squared-relu",),
    },
    "model.normalization": {
        "layernorm": ("--normalization", "LayerNorm"), "low_precision_layernorm": ("--normalization", "LayerNorm"),
        "rmsnorm": ("--normalization", "RMSNorm"),
    },
    # With a suffix -true the weights have no copy in fp32 there; here they always have one.
    **dict.fromkeys(("trainer.precision", "model.precision", "trainer.plugins.precision"), _PRECISIONS),
    "model.optim.name": dict.fromkeys(
        ("adamw", "fused_adam", "megatron_fused_adam", "distributed_fused_adam", "mcore_distributed_optim"), _ADAM
    ) | {"sgd": ("--optimizer", "sgd")},
    "model.optim.sched.name": {"cosineannealing": ("--lr-decay-style", "cosine")},
    "model.data.data_impl": {"mmap": _NOTHING, "mock": ("--mock-data",)},
    "model.data.mock_dataset": {True: ("--mock-data",), False: _NOTHING},
}  # fmt: skip
_OFF: tuple[Any, ...] = (None, False)
_FIXED: dict[str, tuple[Any, ...]] = {
    "model.transformer_block_type": (None, "pre_ln"), "model.headscale": _OFF, "model.use_emha": _OFF,
    "model.normalize_attention_scores": (None, True), "model.attention_type": (None, "multihead"),
    "model.scale_positional_embedding": _OFF, "model.apply_embedding_scaling": _OFF, "model.pre_process": (None, True),
    "model.post_process": (None, True), "model.megatron_legacy": _OFF, "model.resume_from_checkpoint": (None,),
    "model.restore_from_path": (None,), "model.restore_from_ckpt": (None,), "restore_from_path": (None,),
    "model.peft.peft_scheme": (None, "none"), "model.tokenizer.delimiter": (None,), "model.moe_layer_freq": (None, "1"),
    "model.tokenizer.sentencepiece_legacy": _OFF, "model.optim.sched.constant_steps": (None, "0"),
    "optim.lr_scheduler.constant_steps": (None, "0"), "exp_manager.resume_from_checkpoint": (None,),
    "resume.restore_config": (None,), "resume.restore_config.path": (None,), "resume.import_path": (None,),
    "model.encoder_attn_mask_type": (None, "causal"), "trainer.accumulate_grad_batches": (None, "1"),
    "trainer.accelerator": (None, "gpu", "auto"), "trainer.gradient_clip_algorithm": (None, "norm"),
    "trainer.overfit_batches": (None, "0", "0.0"), "trainer.fast_dev_run": _OFF,
    "model.data.shuffle_documents": (None, True), "model.data.legacy_dataset": _OFF,
    "model.data.no_seqlen_plus_one_input_tokens": _OFF, "model.data.pad_samples_to_global_batch_size": _OFF,
    "model.use_scaled_init_method": (None, True), "model.ffn_dropout": (None, "0"),
    "model.cpu_offloading_activations": (None, True), "model.data.validation_drop_last": (None, True),
    "model.skip_train": _OFF, "model.fsdp": _OFF,
}  # fmt: skip
_HARMLESS = {
    "of Lightning's trainer: a run ends by --train-iters, and saves and logs by flags of its own": (
        "trainer.logger trainer.enable_checkpointing trainer.use_distributed_sampler trainer.replace_sampler_ddp"
        " trainer.max_epochs trainer.max_time trainer.benchmark trainer.enable_model_summary trainer.strategy"
        " trainer.enable_progress_bar trainer.num_sanity_val_steps trainer.limit_test_batches trainer.profiler"
        " trainer.callbacks trainer.check_val_every_n_epoch trainer.sync_batchnorm trainer.detect_anomaly"
        " trainer.deterministic trainer.default_root_dir trainer.plugins name"
    ),
    "of NeMo's launcher": "cluster_type",
    "how the same is computed": (
        "model.mcore_gpt model.transformer_engine model.megatron_amp_O2 model.grad_div_ar_fusion"
        " model.gradient_as_bucket_view model.grad_allreduce_chunk_size_mb model.get_attention_mask_from_fusion"
        " model.bias_dropout_add_fusion model.masked_softmax_fusion model.apply_rope_fusion model.persist_layer_norm"
        " model.gradient_accumulation_fusion model.use_cpu_initialization model.sync_batch_comm model.gc_interval"
        " model.reduce_amax model.pipeline_dtype model.cpu_offloading_weights model.enable_megatron_timers"
        " model.defer_embedding_wgrad_compute model.batch_p2p_comm model.deallocate_pipeline_outputs"
        " model.apex_transformer_log_level model.onnx_safe"
        " model.name model.dist_ckpt_format model.dist_ckpt_parallel_save model.optim.bucket_cap_mb"
        " model.optim.overlap_grad_sync model.optim.overlap_param_sync model.optim.contiguous_grad_buffer"
        " model.optim.contiguous_param_buffer model.optim.grad_sync_dtype model.optim.param_sync_dtype"
        " model.fp8_params model.num_micro_batches_with_partial_activation_checkpoints"
        " model.activations_checkpoint_layers_per_pipeline model.optim.overlap_grad_reduce model.overlap_p2p_comm"
        " model.optim.overlap_param_gather"
    ),
    "how files are read and written": (
        "model.tokenizer.use_fast model.data.exchange_indices_distributed model.data.skip_warmup"
        " model.data.delay_data_init model.data.delay_data_mmap model.save_nemo_on_train_end"
    ),
}  # fmt: skip
# First parts of keys of which none says what is computed.
FAMILIES = {
    **dict.fromkeys(
        ("exp_manager", "log", "resume"),
        "of NeMo's experiment manager; here --save, --load, --save-interval and --tensorboard-dir",
    ),
    "hydra": "of Hydra itself", "model.nsys_profile": "a profiler's", "trainer.logger": "of Lightning's logger",
    "trainer.callbacks": "of Lightning's callbacks", "model.megatron_timer_kwargs": "of timers",
    "run": "of NeMo's launcher: names, places and times of jobs",
}  # fmt: skip
KEYS = KeyTable(
    honoured=frozenset((*NAMES, *RANKS, *JOINT, *CHOICES)), fixed=_FIXED, harmless=by_reason(_HARMLESS),
    problem="this changes the run and is not supported",
)  # fmt: skip
