"""``hetero-megatron generate``: continue prompts with a model, under any plan; alone or under torchrun."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_megatron.cli.arguments import ArgumentParser, Number, count
from hetero_megatron.cli.output import print_json
from hetero_megatron.cli.rank_errors import end_rank
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError, without_controls
from hetero_megatron.training.exit import at_once, import_torch
from hetero_megatron.utils.files import read_lines
from hetero_megatron.utils.text import did_you_mean, notice_line, plural

if TYPE_CHECKING:
    from hetero_megatron.cli.generate_settings import Ending
    from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
    from hetero_megatron.generation import Weights
    from hetero_megatron.spec import ModelSpec
    from hetero_megatron.training.config import RunConfig

MAX_TOKENS = 1 << 20


class Generated(NamedTuple):
    """Token ids of prompts and, on the first rank of the plan, of their answers with the texts; seconds that they
    took."""

    prompts: list[list[int]]
    answers: list[list[int]]
    texts: list[str]
    seconds: float
    tokenizer: HuggingFaceTokenizer


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; an error is one line on standard error."""
    launcher = LauncherEnvironment()
    try:
        args, other_words = parse(argv)
        launcher = read_launcher(environment)
        with at_once(launcher.rank == 0):
            generated = generate(args, other_words, launcher, environment)
        if launcher.rank == 0:
            _print(args, generated)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return end_rank(error, launcher, environment)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "generate",
        "Continue prompts. The model's own flags and those of the plan are pretrain's: --load-hf, --plan, --bf16, "
        "--tensor-model-parallel-size, --pipeline-model-parallel-size, …",
    )
    add = parser.add_argument_group("model").add_argument
    add("--load", metavar="DIR", help="directory of checkpoints (--save of a training run), instead of --load-hf")
    add("--ckpt-step", type=count(0, 10**12), metavar="N", help="which checkpoint; the latest if left out")
    add("--load-hf", metavar="DIR", help="directory of a Hugging Face model, or its name on the hub; base of adapters")
    add("--load-adapter", metavar="DIR", help="adapters in PEFT's form")
    add("--tokenizer-model", metavar="DIR", help="tokenizer, if not that of --load-hf or the checkpoint")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompt-file", metavar="FILE", help="one prompt per line")
    add("--chat", action="store_true", help="prompts are messages of a user, for the tokenizer's chat template")
    add("--chat-template", metavar="FILE", help="another Jinja template; implies --chat")
    add("--system", metavar="TEXT", help="message of the system before each prompt; implies --chat")
    add = parser.add_argument_group("answers").add_argument
    add("--max-new-tokens", type=count(1, MAX_TOKENS), default=64, metavar="N", help="most tokens of an answer (64)")
    add("--temperature", type=Number(float, 0, 1e6), metavar="T", help="0: always the most likely token (default)")
    add("--top-p", type=Number(float, None, 1, above=0), metavar="P",
        help="from the most likely tokens with this probability (1)")  # fmt: skip
    add("--top-k", type=count(0, MAX_TOKENS), metavar="K", help="from the K most likely tokens (0: all)")
    add("--ignore-generation-config", action="store_true", help="take only the ends from generation_config.json")
    add("--seed", type=count(0, 2**32 - 1), default=1234, metavar="N", help="of draws (1234)")
    add("--batch-size", type=count(1, MAX_TOKENS), default=8, metavar="N", help="prompts of a pipeline at a time (8)")
    add("--ignore-eos", action="store_true", help="go on after the end of the sequence")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def parse(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """(own flags, words for the model and the plan)."""
    args, other_words = _parser().parse_known_args(list(argv))
    for flag, number in {"--top-p": args.top_p, "--top-k": args.top_k}.items():
        if number not in (None, 0, 1.0) and not args.temperature:
            accepted = "--temperature 1 beside it, or leave the flag out"
            raise UserError("has no effect at temperature 0", field=flag, value=number, accepted=accepted)
    if not args.prompt and args.prompt_file is None:
        accepted = "--prompt TEXT or --prompt-file FILE"
        raise UserError("missing: nothing to continue", field="--prompt", accepted=accepted)
    if args.load is None and args.load_hf is None:
        for word in other_words:
            if hint := did_you_mean(name := word.partition("=")[0], ("--load-hf", "--load"), 0.75):
                raise UserError(f"no such flag{hint}", field=name)
        raise UserError("missing: no model", field="--load-hf", accepted="--load-hf DIR or --load DIR")
    if args.ckpt_step is not None and args.load is None:
        raise UserError("has no effect without --load", field="--ckpt-step", value=args.ckpt_step)
    if args.load_adapter is not None and (args.load is not None or args.load_hf is None):
        raise UserError("needs its base", field="--load-adapter", value=args.load_adapter, accepted="--load-hf DIR")
    return args, other_words


def generate(
    args: Namespace, rest: list[str], launcher: LauncherEnvironment, environment: Mapping[str, str]
) -> Generated:
    """Continue the prompts of the arguments (:func:`parse`), on this rank of the job."""
    config, checkpoint, tokenizer, ending = _configure(args, rest, environment)
    prompts = _prompts(args, tokenizer)
    length = max(map(len, prompts)) + args.max_new_tokens
    if length > config.spec.max_position_embeddings:
        raise UserError(
            f"with the longest prompt this is {length} tokens; the model has {config.spec.max_position_embeddings} "
            "positions", field="--max-new-tokens", value=args.max_new_tokens, accepted="fewer tokens, shorter prompts",
        )  # fmt: skip
    _check_switch(args, config.spec, prompts)
    from hetero_megatron.generation import open_weights

    weights = open_weights(config.spec, config.load_hf, args.load_adapter, checkpoint)
    notices = (*tokenizer.notices, *ending.notices, *(weights.base.notices if weights.base is not None else ()))
    for notice in notices if launcher.rank == 0 else ():
        print(notice_line(notice), file=sys.stderr, flush=True)
    answers, seconds = _generate(args, config, weights, launcher, prompts, length, ending)
    texts = [tokenizer.decode(answer) for answer in answers]
    return Generated(prompts, answers, texts, seconds, tokenizer)


def _check_switch(args: Namespace, spec: ModelSpec, prompts: list[list[int]]) -> None:
    """UserError where an answer grows out of longrope's short factors in a family of which transformers then keeps keys
    that were turned by them; of Phi it computes these anew."""
    switches = [rope.switch for rope in spec.ropes if rope.switch is not None and spec.hf_model_type != "phi3"]
    for switch in switches:
        crossing = [len(p) for p in prompts if len(p) <= switch < len(p) + args.max_new_tokens]
        if crossing:
            raise UserError(
                f"an answer to a prompt of {max(crossing)} tokens may cross original_max_position_embeddings "
                f"({switch}), beyond which longrope turns otherwise", field="--max-new-tokens",
                value=args.max_new_tokens,
                accepted=f"at most {switch - max(crossing)}, or prompts of more tokens than that",
            )  # fmt: skip


def _configure(
    args: Namespace, rest: list[str], environment: Mapping[str, str]
) -> tuple[RunConfig, Any, HuggingFaceTokenizer, Ending]:
    """(model and plan, checkpoint or None, tokenizer, how answers are made and end)."""
    from hetero_megatron.cli.configure import configure
    from hetero_megatron.cli.generate_settings import find_settings

    import_torch()
    words, spec, checkpoint, source = [*rest, "--dry-run"], None, None, args.load_hf
    if args.load is not None:
        from hetero_megatron.checkpoint.convert import spec_of
        from hetero_megatron.checkpoint.native import open_checkpoint

        checkpoint = open_checkpoint(args.load, None, args.ckpt_step, field="--load")
        if checkpoint is None:
            accepted = "a directory that --save wrote"
            raise UserError("holds no checkpoint", field="--load", value=args.load, accepted=accepted)
        spec = spec_of(checkpoint)
    if args.load_hf is not None:
        words += ["--load-hf", args.load_hf]
    if args.load_adapter is not None:
        words += ["--load-adapter", args.load_adapter]
    if not {"--plan", "--auto-plan"} & {word.partition("=")[0] for word in rest}:
        words += ["--seq-length", "8", "--micro-batch-size", "1"]
    config = configure(words, environment, spec, generates=True)
    source = config.load_hf if config.load_hf is not None else args.load
    tokenizer = _tokenizer(args, source, checkpoint)
    return config, checkpoint, tokenizer, find_settings(args, source, checkpoint, tokenizer, config.spec.vocab_size)


def _tokenizer(args: Namespace, source: str, checkpoint: Any) -> HuggingFaceTokenizer:
    from hetero_megatron.checkpoint.model_files import CONFIG, write_new
    from hetero_megatron.data.tokenizers import HuggingFaceTokenizer

    if args.tokenizer_model is not None:
        return HuggingFaceTokenizer(args.tokenizer_model)
    if checkpoint is not None and args.load_hf is None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            stored = checkpoint.model_files()
            stored.write(Path(folder))
            if CONFIG in stored.files:  # its model_type says which tokenizer it is where the tokenizer's files do not
                write_new(Path(folder) / CONFIG, stored.files[CONFIG])
            if not stored.tokenizer().files:
                raise UserError(
                    "the checkpoint holds no tokenizer", field="--tokenizer-model",
                    accepted="the directory or name of the model's tokenizer",
                )  # fmt: skip
            return HuggingFaceTokenizer(folder)
    return HuggingFaceTokenizer(source)


def _prompts(args: Namespace, tokenizer: HuggingFaceTokenizer) -> list[list[int]]:
    """Token ids of all prompts."""
    from hetero_megatron.data.tokenize import encode_texts

    texts = list(args.prompt)
    if args.prompt_file is not None:
        texts += read_lines(args.prompt_file, "--prompt-file")
    if not texts:
        raise UserError("holds no prompt", field="--prompt-file", value=args.prompt_file, accepted="one per line")
    if args.chat or args.system is not None or args.chat_template is not None:
        from hetero_megatron.data.chat.build import read_template
        from hetero_megatron.data.chat.encode import ChatEncoder

        encoder = ChatEncoder(tokenizer, *read_template(args.chat_template, tokenizer))
        system_turns = [{"role": "system", "content": args.system}] if args.system is not None else []
        return encoder.prompts([[*system_turns, {"role": "user", "content": text}] for text in texts])
    encoded = [ids.tolist() for ids in encode_texts(texts, tokenizer)]
    if empty := next((text for text, ids in zip(texts, encoded) if not ids), None):
        raise UserError("becomes no token", field="--prompt", value=empty, accepted="text")
    return encoded


def _generate(
    args: Namespace, config: RunConfig, weights: Weights, launcher: LauncherEnvironment,
    prompts: list[list[int]], length: int, ending: Ending,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """(answers on the first rank of the plan, seconds of generation)."""
    from hetero_megatron.cli.generate_settings import filters_of
    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.generation import Decoder, Sampling
    from hetero_megatron.plans.shares import pipeline_shares
    from hetero_megatron.platform.platform import DTYPES
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.training.kernels import rank_kernels
    from hetero_megatron.training.rank_platform import (
        check_device,
        check_world,
        plan_for,
        platform_at,
        position,
        transport_of,
    )

    check_world(config, launcher.world_size)
    place = position(config.cluster, launcher)
    plugins, dtype = load_plugins(), DTYPES[config.dtype]
    platform = platform_at(place, config.cluster, launcher, plugins, config.platform, config.distributed.backend)
    check_device(platform, launcher)
    transport = transport_of(config.distributed.transport, config.cluster)
    comm = start_comm(platform, 60 * config.distributed.timeout_minutes, place, launcher, None, transport)
    comm.create_groups([tuple(range(launcher.world_size))])
    plan = plan_for(config.plan, comm.islands)
    comm.create_groups(config.compiled.groups)
    answers: list[list[int]] = []
    began = time.perf_counter()
    if comm.rank in plan.ranks:
        kernels = rank_kernels(plan, config.spec, comm.rank, plugins.registry, platform, dtype)
        decoder = Decoder(plan, config.spec, comm, dtype, weights, length, kernels)
        shares = pipeline_shares(plan, len(prompts))
        start = sum(shares[: decoder.place.pipeline])
        prompt_range = range(start, start + shares[decoder.place.pipeline]) if decoder.works else range(0)
        filters = filters_of(args, ending.settings)
        sampling = Sampling(args.temperature or 0.0, filters, args.seed, ending.settings, ending.ends)
        began = time.perf_counter()
        own_answers: list[list[int]] = []
        for first in range(prompt_range.start, prompt_range.stop, args.batch_size):
            batch = prompts[first : min(first + args.batch_size, prompt_range.stop)]
            own_answers += decoder.generate(batch, first, args.max_new_tokens, sampling, ending.stops)
        leads = decoder.works and decoder.place.stage == 0 and decoder.place.tp_rank == 0
        answers_of_ranks = decoder.world.gather_objects(own_answers if leads else [], list[list[int]])
        answers = _in_order(plan, answers_of_ranks)
    seconds = time.perf_counter() - began
    with suppress(Exception):
        stop_comm(platform)
    return answers, seconds


def _in_order(plan: Any, everyone: list[list[list[int]]]) -> list[list[int]]:
    """Answers of all pipelines, in the order of the prompts."""
    by_rank = dict(zip(plan.ranks, everyone))
    leaders = [pipeline.stages[0].units[0].ranks[0] for pipeline in plan.pipelines]
    return [answer for rank in leaders for answer in by_rank[rank]]


def _print(args: Namespace, generated: Generated) -> None:
    prompts, answers, texts, seconds, tokenizer = generated
    count = sum(map(len, answers))
    if args.json:
        continuations = [
            {"prompt_tokens": len(p), "tokens": a, "text": t} for p, a, t in zip(prompts, answers, texts, strict=True)
        ]
        print_json({"answers": continuations, "new_tokens": count, "seconds": round(seconds, 4)})
        return
    prompt_texts = args.prompt + ([""] * (len(prompts) - len(args.prompt)))
    for prompt, ids, text in zip(prompt_texts, prompts, texts, strict=True):
        if len(prompts) > 1:
            print(without_controls(f"--- {prompt or tokenizer.decode(ids)}"))
        print(without_controls(text), flush=True)
    rate = count / max(seconds, 1e-9)
    print(notice_line(f"{plural(count, 'token')} in {seconds:.2f} s, {rate:.1f}/s"), file=sys.stderr, flush=True)
