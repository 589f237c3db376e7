"""Megatron's architecture flags, or --model, -> a ModelSpec."""

from __future__ import annotations

from dataclasses import replace

from hetero_megatron.cli.flags.expert_flags import build_moe, mlp_kinds, moe_family, said_of_experts
from hetero_megatron.cli.flags.parse import Arguments, flag_error, flag_name
from hetero_megatron.data import DataConfig, config_tokenizer
from hetero_megatron.errors import UserError
from hetero_megatron.spec import Dropout, LayerKind, ModelSpec, Rope, RopeScaling, load_model
from hetero_megatron.spec.dropout import DROPOUT_KEYS, NO_DROPOUT


def build_spec(args: Arguments, data: DataConfig | None) -> ModelSpec:
    """The model that the flags describe.

    Raises:
        UserError: an architecture flag that contradicts --model, a missing or contradictory flag, or what
            ``load_model`` refuses.
    """
    if args["model"] is not None or args["load_hf"] is not None:
        model_key = "model" if args["model"] is not None else "load_hf"
        spec = _stretched(args, load_model(args[model_key], flag_name(model_key)))
        _check_agreement(args, spec)
        spec = with_predictions(args, spec)
        args.notices.extend(spec.notices)
        _say_unused_dropout(args, spec)
        return spec
    for key in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if args[key] is None:
            raise flag_error(key, None, "missing, and there is no --model", "a number, or --model")
    try:
        return with_predictions(args, _spec(args, _vocabulary(args, data)))
    except UserError as error:
        raise _renamed(error) from None


def with_predictions(args: Arguments, spec: ModelSpec) -> ModelSpec:
    """With the modules that predict further tokens that the flags ask for, which generation leaves out."""
    if args.generates:
        return replace(spec, mtp_layers=0)
    key, depth, depth_of_model = "mtp_num_layers", args["mtp_num_layers"], spec.mtp_said
    if args["load_hf"] is not None and depth > depth_of_model:
        accepted = f"at most {depth_of_model}" if depth_of_model else "0, or --model, whose weights begin anew"
        raise flag_error(
            key, depth, f"--load-hf {args['load_hf']} says {depth_of_model}, and has weights of no more", accepted
        )
    if not depth:
        return spec
    from hetero_megatron.spec.hf_export import predicts

    notices = [text for text in spec.notices if "predict further tokens" not in text]
    if depth_of_model > depth:
        notices.append(
            f"{spec.name} has {depth_of_model} layers that predict further tokens, of which {depth} are trained"
        )
    try:
        new_spec = replace(
            spec, notices=tuple(notices), mtp_layers=depth, mtp_loss_factor=args["mtp_loss_scaling_factor"]
        )
    except UserError as error:
        raise flag_error(key, depth, error.problem, error.accepted) from None
    if not predicts(new_spec):
        args.notices.append(
            f"a Hugging Face {spec.hf_model_type} model has no layers that predict further tokens: --save-hf and "
            "convert write the model without them, checkpoints have them"
        )
    return new_spec


def _stretched(args: Arguments, spec: ModelSpec) -> ModelSpec:
    """--max-position-embeddings may give a model more positions than it was made for, where they are not learned."""
    key = "max_position_embeddings"
    if key not in args.given or spec.position != "rope" or args[key] <= spec.max_position_embeddings:
        return spec
    args.notices.append(f"{spec.name} was made for {spec.max_position_embeddings} positions, not {args[key]}")
    return replace(spec, max_position_embeddings=args[key])


def _check_agreement(args: Arguments, spec: ModelSpec) -> None:
    """Architecture flags beside --model must say what it says. Not --vocab-size: it sizes a NullTokenizer there."""
    rope, grouped = spec.position == "rope", spec.num_kv_heads < spec.num_heads
    turning = spec.ropes[0] if len(spec.ropes) == 1 else None
    scaling = turning.scaling if turning is not None else None
    model_values: dict[str, object] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "group_query_attention": grouped,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "use_rotary_position_embeddings": rope,
        "rotary_base": turning.theta if turning is not None else None,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling is not None else None,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[spec.norm],
        "norm_epsilon": spec.norm_eps,
        "swiglu": spec.activation == "swiglu",
        "squared_relu": spec.activation == "squared_relu",
        "openai_gelu": spec.activation == "gelu_tanh",
        "no_bias_gelu_fusion": spec.activation != "gelu_tanh",
        "disable_bias_linear": not (spec.out_bias or spec.mlp_bias),
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm == "head",
        "untie_embeddings_and_output_weights": not spec.tied,
        "init_method_std": spec.init_std,
        "window_size": spec.windows[0] if len(spec.windows) == 1 else spec.windows,
        "num_experts": None,
    }
    if spec.moe is not None:
        model_values |= said_of_experts(spec.moe)
    if spec.moe is not None and "moe_layer_freq" in args.given:
        kinds = mlp_kinds(args["moe_layer_freq"], spec.num_layers)
        model_values["moe_layer_freq"] = (
            args["moe_layer_freq"] if kinds == [k.mlp for k in spec.layers] else "other layers"
        )
    for key, model_says in model_values.items():
        if key not in args.given:
            continue
        flag_value = _window(args[key]) if key == "window_size" else args[key]
        if flag_value != model_says:
            source = f"--model {args['model']}" if args["model"] is not None else f"--load-hf {args['load_hf']}"
            raise flag_error(key, args[key], f"{source} says {_shown(model_says)}", "leave the flag out")


def _shown(value: object) -> str:
    words = {"True": "yes", "False": "no", "None": "none"}
    return words.get(str(value), str(value))


def _spec(args: Arguments, vocab_size: int) -> ModelSpec:
    heads, head_dim = _heads(args), _head_dim(args)
    _say_no_dropout(args)
    rope, norm = _rope(args), {"RMSNorm": "rms", "LayerNorm": "layer"}[args["normalization"]]
    bias = not args["disable_bias_linear"]
    window = _window(args["window_size"])
    scaling = RopeScaling("llama3", args["rope_scaling_factor"]) if args["use_rope_scaling"] else None
    moe = build_moe(args, _ffn(args))
    kinds = mlp_kinds(args["moe_layer_freq"], args["num_layers"]) if moe is not None else ["dense"]
    family = moe_family(args, moe) if moe is not None else _family(args, window)
    return ModelSpec(
        name="flags",
        hf_model_type="gpt2" if norm == "layer" and not rope else family,
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        ffn_hidden_size=_ffn(args),
        num_heads=args["num_attention_heads"],
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=args["max_position_embeddings"] or args["seq_length"],
        norm=norm,
        norm_eps=args["norm_epsilon"],
        activation=_activation(args),
        qkv_bias=bias or args["add_qkv_bias"],
        out_bias=bias,
        mlp_bias=bias,
        qk_norm="head" if args["qk_layernorm"] else None,
        tied=not args["untie_embeddings_and_output_weights"],
        position="rope" if rope else "learned",
        layer_kinds=tuple(LayerKind(window, Rope(args["rotary_base"], scaling), kind) for kind in kinds),
        moe=moe,
        init_std=args["init_method_std"],
    )


def _say_no_dropout(args: Arguments) -> None:
    absent_flags = [flag_name(key) for key in ("attention_dropout", "hidden_dropout") if key not in args.given]
    if absent_flags:
        args.notices.append(f"no dropout, as if by {' 0 '.join([*absent_flags, ''])}(Megatron's default is 0.1)")


def _say_unused_dropout(args: Arguments, spec: ModelSpec) -> None:
    """What a model's configuration says about dropout counts only where a flag says it, too."""
    for name, keys in DROPOUT_KEYS.items():
        flag = f"{name}_dropout"
        rates_of_model = [(key, rate) for key, rate in spec.dropouts if key in keys]
        if rates_of_model and flag not in args.given:
            rates = ", ".join(f"{key} {rate:g}" for key, rate in rates_of_model)
            args.notices.append(
                f"{spec.name} says {rates}: trained without, as if by {flag_name(flag)} 0 "
                f"({flag_name(flag)} {rates_of_model[0][1]:g}: with it)"
            )


def build_dropout(args: Arguments) -> Dropout:
    """The rates of --hidden-dropout and --attention-dropout."""
    if not args.has("hidden_dropout", "attention_dropout"):
        return NO_DROPOUT
    try:
        return Dropout(args["hidden_dropout"], args["attention_dropout"])
    except UserError as error:
        key = f"{error.field}_dropout"
        raise flag_error(key, args[key], error.problem, error.accepted) from None


def _family(args: Arguments, window: int | None) -> str:
    """The Hugging Face family whose config can say the same."""
    if args["qk_layernorm"]:
        return "qwen3"
    if args["disable_bias_linear"] and args["add_qkv_bias"]:
        return "qwen2"
    return "mistral" if window is not None else "llama"


def _heads(args: Arguments) -> int:
    """Key-value heads."""
    if not args["group_query_attention"]:
        if args.has("num_query_groups") and args["num_query_groups"] not in (1, args["num_attention_heads"]):
            raise flag_error("num_query_groups", args["num_query_groups"], "it needs --group-query-attention")
        return int(args["num_attention_heads"])
    return int(args["num_query_groups"])


def _head_dim(args: Arguments) -> int:
    if args["kv_channels"] is not None:
        return int(args["kv_channels"])
    hidden, heads = args["hidden_size"], args["num_attention_heads"]
    if hidden % heads:
        problem = f"--hidden-size {hidden} does not divide into that many heads"
        raise flag_error("num_attention_heads", heads, problem, f"a divisor of {hidden}, or --kv-channels")
    return int(hidden // heads)


def _ffn(args: Arguments) -> int:
    if args["ffn_hidden_size"] is not None:
        return int(args["ffn_hidden_size"])
    ungated = 4 * int(args["hidden_size"])
    return max(64, int(ungated * 2 / 3 / 64) * 64) if args["swiglu"] else ungated


def _activation(args: Arguments) -> str:
    kinds = {"swiglu": "swiglu", "squared_relu": "squared_relu", "openai_gelu": "gelu_tanh"}
    kinds_given = [key for key in kinds if args[key]]
    if len(kinds_given) > 1:
        raise flag_error(kinds_given[1], True, f"it contradicts --{kinds_given[0].replace('_', '-')}", "one of the two")
    if kinds_given:
        return kinds[kinds_given[0]]
    return "gelu" if args["no_bias_gelu_fusion"] else "gelu_tanh"


def _rope(args: Arguments) -> bool:
    kind = args["position_embedding_type"]
    if args["use_rotary_position_embeddings"] and args.has("position_embedding_type") and kind != "rope":
        raise flag_error("position_embedding_type", kind, "it contradicts --use-rotary-position-embeddings", "rope")
    rope = kind == "rope" or bool(args["use_rotary_position_embeddings"])
    for key in ("use_rope_scaling", "rotary_base", "no_position_embedding"):
        if not rope and key in args.given:
            raise flag_error(key, args[key], "the model has no rotary embedding", "--position-embedding-type rope")
    if args.has("rope_scaling_factor") and not args["use_rope_scaling"]:
        raise flag_error("rope_scaling_factor", args["rope_scaling_factor"], "it needs --use-rope-scaling")
    return rope


def _window(text: str | None) -> int | None:
    """Megatron counts earlier tokens only; a window here includes the token itself."""
    if text is None:
        return None
    try:
        earlier_tokens, later_tokens = (int(part) for part in text.strip("()[] ").split(","))
    except ValueError:
        raise flag_error("window_size", text, "is not two integers", "LEFT,RIGHT, e.g. 4095,0") from None
    if earlier_tokens < 0 or later_tokens != 0:
        raise flag_error("window_size", text, "cannot be used as a causal window", "LEFT >= 0 and RIGHT = 0")
    return earlier_tokens + 1


def _vocabulary(args: Arguments, data: DataConfig | None) -> int:
    """Rows of the embedding: given, or as many as the tokenizer has ids (a NullTokenizer has one more)."""
    if args["vocab_size"] is not None:
        return int(args["vocab_size"]) + (args["tokenizer_type"] == "NullTokenizer")
    if data is None:
        raise flag_error("vocab_size", None, "missing, and there is no tokenizer to read it from", "a number")
    return config_tokenizer(data).vocab_size


_FLAG_OF = {
    "num_heads": "--num-attention-heads", "num_kv_heads": "--num-query-groups", "head_dim": "--kv-channels",
    "norm_eps": "--norm-epsilon", "theta": "--rotary-base",
}  # fmt: skip


def _renamed(error: UserError) -> UserError:
    """A refusal of a field of ModelSpec, as one of the flag that it came from."""
    if error.field.startswith("--"):
        return error
    name = _FLAG_OF.get(error.field, "--" + error.field.replace("_", "-"))
    return UserError(error.problem, field=name, value=error.value, accepted=error.accepted, where="command line")
