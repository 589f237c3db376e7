"""One training step on one very long sequence over ranks of two chip types, and its agreement with one rank.

    python benchmarks/million_tokens.py                       # 65,536 tokens on 4 ranks: a minute or two on two cores
    python benchmarks/million_tokens.py --tokens 1048576      # the million: about an hour on two cores

Ranks 0 and 1 (``big``) form one context group, 2 and 3 (``small``) another; a big rank owns three times as many
tokens. Inside a group heads are divided, between groups keys and values go round in equal blocks. More ranks than
four join the small group. Reported: seconds, peak memory per rank above what it had before the step, and

- up to ``--check`` x 2 tokens: loss, logits of a prefix and all gradients against one rank with the same sequence;
- beyond: logits of a prefix against one rank with that prefix alone (causal: what follows changes nothing), and
  gradients of a sequence of 2 x ``--check`` tokens whose later labels are masked against one rank with the first
  ``--check`` tokens: that rank has less than half the sequence, so no later token may leave a trace.

Ranks run on the platform that is here (``--platform`` names another of ``hetero-megatron plugins list``), with the
kernels that training would choose there, and memory is that of its device: on an accelerator what torch allocated at
most, on the CPU the resident set. Attention by the reference holds scores of every query with every key: it is refused
above 4096 tokens. Prints one JSON object on its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.common import machine  # noqa: E402

SEED = 20261121
LOGITS_BYTES = 64 << 20
QUADRATIC = 4096  # most tokens for which the scores of all queries and keys may be held


def model(options: argparse.Namespace) -> dict[str, Any]:
    """A Llama; positions suffice for the longest sequence of the run."""
    return {
        "model_type": "llama", "num_hidden_layers": options.layers, "hidden_size": options.heads * options.head_dim,
        "num_attention_heads": options.heads, "num_key_value_heads": options.heads, "head_dim": options.head_dim,
        "intermediate_size": 4 * options.heads * options.head_dim, "vocab_size": 256,
        "max_position_embeddings": max(options.tokens, 2 * options.check), "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    }  # fmt: skip


def spelled_plan(tokens: int, ranks: int, layers: int, heads: int) -> dict[str, Any]:
    """Two groups of unlike chips, token shares 3 to 1; one rank: the plain plan."""
    stage: dict[str, Any] = {"ranks": list(range(ranks)), "layers": [0, layers]}
    if ranks > 1:
        weights = [3, 3] + [1] * (ranks - 2) if ranks >= 4 else [3] + [1] * (ranks - 1)
        shares = [tokens * w // sum(weights) for w in weights]
        shares[0] += tokens - sum(shares)
        cut = 2 if ranks >= 4 else 1
        stage["context"] = [
            {"ranks": group, "tokens": [shares[r] for r in group], "heads": even(heads, len(group))}
            for group in (list(range(cut)), list(range(cut, ranks)))
        ]
        stage["kv"] = {"transport": "ring", "block": max(tokens // 32, 1)}
    pipeline = {"micro_batch_size": 1, "num_micro_batches": 1, "stages": [stage]}
    return {"version": 1, "seq_length": tokens, "global_batch_size": 1, "pipelines": [pipeline]}


def even(total: int, parts: int) -> list[int]:
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


@dataclass(frozen=True)
class WatchedLoss:
    """A stage's loss whose input is shown to ``watch`` first."""

    loss: Any
    watch: Callable[[Any], None]

    def __call__(self, out: Any, batch: Any, seed: float, /) -> Any:
        self.watch(out)
        return self.loss(out, batch, seed)

    def count(self, batch: Any) -> int:
        return int(self.loss.count(batch))


def one_rank_of_the_job(options: argparse.Namespace) -> None:
    """What every rank process does; writes ``rank-N.pt`` into the directory ``--out``."""
    import torch

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.data.batch import Batch
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.plans.kernels import with_kernels
    from hetero_megatron.platform import choose_platform
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.kernels import rank_kernels
    from hetero_megatron.training.runtime import Runtime
    from hetero_megatron.training.runtime_options import RuntimeOptions

    torch.set_num_threads(options.threads)
    spec = from_hf_config(model(options))
    spelled = spelled_plan(options.run_tokens, options.ranks, options.layers, options.heads)
    plan = with_kernels(plan_from_dict(spelled, spec), options.kernels)
    plugins = load_plugins()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    platform = choose_platform(plugins.platforms.values(), options.platform, options.backend, local)
    comm = start_comm(platform, 3600)
    computed = RuntimeOptions(logits_bytes=LOGITS_BYTES)
    kernels = rank_kernels(plan, spec, comm.rank, plugins.registry, platform, torch.float32, computed)
    refuse_quadratic(kernels.provider("attention"), options)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    runtime = Runtime(
        compiled, comm, torch.float32, lambda t, box: initial_values(t, box, spec, SEED),
        lambda groups: torch.optim.SGD(groups, lr=0.0), kernels, computed,
    )  # fmt: skip
    assert runtime.optimizer is not None
    longest = max(options.tokens, 2 * options.check)
    tokens = torch.randint(0, 256, (1, longest + 1), generator=torch.Generator().manual_seed(SEED))
    rows = tokens[:, : options.run_tokens + 1]
    mask = (torch.arange(options.run_tokens) < options.loss_tokens)[None] if options.loss_tokens else None
    positions = torch.arange(options.run_tokens)[None]
    batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, mask)
    seen: dict[str, Any] = {"grads": []}
    (chunk,) = runtime.executor.chunks
    step, loss = runtime.optimizer.step, chunk.loss
    assert loss is not None

    def keep_prefix(out: Any) -> None:
        """The logits of the prefix's tokens that this rank owns."""
        tokens = [t for a, b in runtime.here.unit.tokens for t in range(a, b)]
        places = [i for i, t in enumerate(tokens) if t < options.prefix]
        own = [tokens[i] for i in places]
        hidden = out[0, places].detach()
        head = runtime.stage_model.module.lm_head.matrix.detach()
        seen["prefix"] = (own, (hidden if runtime.loss.head is None else hidden @ head.t()).cpu())

    def recording_step(grads: Any, coefficient: float, ahead: bool = False) -> None:
        for exchange, tensors in zip(runtime.sync.exchanges, grads, strict=True):
            for piece, tensor in zip(exchange.pieces, tensors, strict=True):
                seen["grads"].append((piece.name, piece.box.slices(), (tensor * coefficient).cpu()))
        step(grads, coefficient, ahead)

    runtime.executor.chunks = [replace(chunk, loss=WatchedLoss(loss, keep_prefix))]
    runtime.optimizer.step = recording_step  # type: ignore[method-assign]
    platform.synchronize()
    before, start = platform.peak_memory(), time.perf_counter()
    stats = runtime.train_step(lambda _: batch, 0, 1, 0.0)
    platform.synchronize()
    seen |= {"seconds": time.perf_counter() - start, "peak": platform.peak_memory() - before, "loss": stats.loss}
    seen |= {"device": str(platform.device), "chip": platform.chip(), "attention": kernels.provider("attention")}
    seen |= {"busy": stats.busy, "communication": stats.communication, "sent": sum(comm.sent_bytes.values())}
    seen["owned"] = runtime.here.unit.num_tokens
    torch.save(seen, Path(options.out) / f"rank-{comm.rank}.pt")
    stop_comm()


def refuse_quadratic(provider: str, options: argparse.Namespace) -> None:
    """UserError for attention by the reference over more than ``QUADRATIC`` tokens."""
    from hetero_megatron.errors import UserError

    if provider == "reference" and options.run_tokens > QUADRATIC:
        size = options.heads * options.run_tokens**2 * 4
        raise UserError(
            f"it holds the scores of every query with every key: {size / 2**30:,.1f} GiB for {options.run_tokens:,} "
            "tokens", field="kernels.attention", value=provider, where="million_tokens.py",
            accepted=f"another provider (--kernels attention=PROVIDER), or at most {QUADRATIC:,} tokens",
        )  # fmt: skip


def run_job(options: argparse.Namespace, ranks: int, tokens: int, loss_tokens: int = 0) -> list[dict[str, Any]]:
    """What the ranks of one job saw."""
    import torch

    with tempfile.TemporaryDirectory(prefix="million-") as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        words = [sys.executable, __file__, "--as-rank", "--out", folder, "--ranks", str(ranks)]
        words += ["--run-tokens", str(tokens), "--loss-tokens", str(loss_tokens), "--threads", str(options.threads)]
        for name in ("tokens", "check", "prefix", "layers", "heads", "head_dim"):
            words += ["--" + name.replace("_", "-"), str(getattr(options, name))]
        words += ["--backend", options.backend] if options.backend else []
        words += ["--platform", options.platform] if options.platform else []
        words += ["--kernels", *options.kernels] if options.kernels else []
        base = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        base |= {"OMP_NUM_THREADS": str(options.threads), "MALLOC_ARENA_MAX": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = [
            subprocess.Popen(words, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)}, cwd=ROOT) for r in range(ranks)
        ]
        try:
            codes = [process.wait() for process in started]
            if any(codes):
                raise SystemExit("a rank failed")
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
        return [torch.load(Path(folder) / f"rank-{r}.pt", weights_only=False) for r in range(ranks)]


def assembled_grads(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whole gradients by name from the owned pieces."""
    import torch

    sizes: dict[str, list[int]] = {}
    for seen in ranks:
        for name, slices, _ in seen["grads"]:
            sizes[name] = [max(n, s.stop) for n, s in zip(sizes.get(name, [0] * len(slices)), slices, strict=True)]
    whole = {name: torch.zeros(size) for name, size in sizes.items()}
    for seen in ranks:
        for name, slices, value in seen["grads"]:
            whole[name][slices] = value
    return whole


def assembled_prefix(ranks: list[dict[str, Any]], prefix: int) -> Any:
    import torch

    logits = torch.zeros(prefix, 256)
    for seen in ranks:
        places, rows = seen["prefix"]
        logits[places] = rows
    return logits


def relative(got: Any, want: Any) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def worst(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> float:
    """Largest relative error of a tensor's gradient."""
    a, b = assembled_grads(got), assembled_grads(want)
    assert a.keys() == b.keys()
    return max(relative(a[name], b[name]) for name in a)


def compare(options: argparse.Namespace, many: list[dict[str, Any]]) -> dict[str, float]:
    """Relative errors of the step against one rank."""
    whole = options.tokens <= 2 * options.check
    one = run_job(options, 1, options.tokens if whole else options.prefix)
    prefix = assembled_prefix(many, options.prefix), assembled_prefix(one, options.prefix)
    found = {"prefix_logits": relative(*prefix)}
    if whole:
        return found | {
            "loss_error": abs(many[0]["loss"] / one[0]["loss"] - 1), "gradients": worst(many, one),
            "one_rank_seconds": one[0]["seconds"], "one_rank_peak_mib": one[0]["peak"] / 2**20,
        }  # fmt: skip
    masked = run_job(options, options.ranks, 2 * options.check, options.check)
    short = run_job(options, 1, options.check)
    return found | {
        "masked_loss": abs(masked[0]["loss"] / short[0]["loss"] - 1), "masked_gradients": worst(masked, short)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--check", type=int, default=65536, help="tokens of the comparison with one rank")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens whose logits are compared")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--backend", help="of torch.distributed; gloo keeps to the CPU")
    parser.add_argument("--platform", help="of hetero-megatron plugins list; left out: the one that is here")
    parser.add_argument("--kernels", nargs="+", default=[], help="as --kernels of pretrain_gpt.py")
    parser.add_argument("--limit", type=float, default=1e-4, help="largest relative error; more is a failure")
    for hidden in ("--run-tokens", "--loss-tokens"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        from hetero_megatron.errors import UserError

        try:
            one_rank_of_the_job(options)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        return
    print(f"{machine()}: {options.tokens:,} tokens, {options.ranks} ranks, {options.layers} layer(s) of "
          f"{options.heads} x {options.head_dim}", flush=True)  # fmt: skip
    many = run_job(options, options.ranks, options.tokens)
    seconds = max(seen["seconds"] for seen in many)
    print(f"{many[0]['device']} ({many[0]['chip']}), attention by {many[0]['attention']}", flush=True)
    for rank, seen in enumerate(many):
        print(f"rank {rank}: {seen['owned']:>9,} tokens, {seen['peak'] / 2**20:8.1f} MiB above start, "
              f"busy {seen['busy'][rank]:.1f} s, sent {seen['sent'] / 2**20:.1f} MiB", flush=True)  # fmt: skip
    print(f"loss {many[0]['loss']:.6f}, {seconds:.1f} s, {options.tokens / seconds:,.0f} tokens/s", flush=True)
    errors = compare(options, many)
    for name, value in errors.items():
        print(f"against one rank, {name}: {value:.3g}")
    result = {"tokens": options.tokens, "ranks": options.ranks, "seconds": seconds, "loss": many[0]["loss"],
              "device": many[0]["device"], "attention": many[0]["attention"],
              "peak_mib": [round(seen["peak"] / 2**20, 1) for seen in many], **errors}  # fmt: skip
    print(json.dumps(result))
    if max(value for name, value in errors.items() if not name.startswith("one_rank")) > options.limit:
        raise SystemExit("the ranks disagree with one rank")


if __name__ == "__main__":
    main()
