"""docs/models.md from the tables of families: ``python -m hetero_megatron.cli.models --markdown``."""

from __future__ import annotations

import sys

from hetero_megatron.spec.families import FAMILIES, Family
from hetero_megatron.spec.families.refused import REFUSED

_INTRO = """\
# Models

Written by `python -m hetero_megatron.cli.models --markdown` from `hetero_megatron/spec/families/`; do not edit.

`--model` and `--load-hf` take a Hugging Face directory of one of these families, by the `model_type` of its
`config.json`; tokenizer and chat template travel with it. A configuration that asks for something that is not supported
is refused by the name of its key. Each family is compared with transformers' implementation on random small checkpoints
of several shapes: logits, loss and gradients in fp64, under uneven plans, and its files in both directions.

- *TP*: tensor parallelism with sequence parallelism, even or uneven (`tp_split`), also with more ranks than key-value
  heads; and pipelines, virtual chunks and replicas, in any combination.
- *CP*: context groups, equal or not in tokens and heads.
- *EP*: experts divided over ranks, equally or not ([Mixtures of experts](moe.md)).
- *LoRA*: which projections may have adapters, by the names of Llama's; in files of `peft` they have the family's.
  *Fused*: the family's files keep several projections in one matrix, such as `qkv_proj`, `gate_up_proj` or
  `query_key_value`. By that name they have one adapter, with one A, as in `peft`; by the names of Llama's one each,
  which is exported with its base (`--merge-lora`), not by itself. *Merged*: only so, as `peft` has others there. Of a
  mixture of experts, `gate_proj`, `up_proj` and `down_proj` are the routed experts' (of `nemotron_h` the last two:
  they have no gates). Of linear attention and Mamba-2 they are as `peft` names them
  ([Linear attention](linear_attention.md)).
- Of a `llama4`, `qwen3_5` or `qwen3_5_moe` directory (text and images) the language model is read; an export is of that
  alone, `llama4_text`, `qwen3_5_text` or `qwen3_5_moe_text`. Llama 4's chunks of attention, and the positions with
  which its queries grow, are counted from the start of each document, so that documents packed into one row are what
  they are by themselves (transformers counts along the row).
- Layers that predict further tokens (`num_nextn_predict_layers` of `deepseek_v3` and `glm4_moe`) are trained and
  exported where `--mtp-num-layers` asks for them ([Multi-token prediction](mtp.md)), else left out with a notice, as
  transformers leaves them out.
- `qwen3_next`, `qwen3_5_text` and `qwen3_5_moe_text` mix layers of linear attention (Gated DeltaNet) with layers of
  attention, `kimi_linear` (Kimi Delta Attention) with layers of latent attention, `granitemoehybrid` and `bamba`
  layers of Mamba-2 with layers of attention; layers of `nemotron_h` are Mamba-2, attention, an MLP or a mixture
  of experts, one of them each; see [Linear attention](linear_attention.md).
- *Export*: `--save-hf`, as transformers writes it. *Generation*: `hetero-megatron generate`.

## Supported

| `model_type` | released models | TP | uneven TP | CP | EP | LoRA | export | generation |
|---|---|---|---|---|---|---|---|---|
"""
_REFUSED = """
## Refused

Any other `model_type` is refused too, without a reason of its own.

| `model_type` | it needs | nearest supported |
|---|---|---|
"""


def adapters(family: Family) -> str:
    """Which projections of the family may have adapters."""
    if family.mixture:
        experts = family.names.experts
        return "attention, experts" + (", merged" if experts is not None and not experts.interleaved else "")
    names = family.names
    if family.linear or not (names.fused or names.transposed):
        return "all"
    return "all, merged" if names.transposed else "all, fused"


def markdown() -> str:
    """docs/models.md."""
    rows = []
    for name, family in FAMILIES.items():
        experts = "yes" if family.mixture else "-"
        rows.append(
            f"| `{name}` | {family.examples} | yes | yes | yes | {experts} | {adapters(family)} | yes | yes |"
        )
    refused = [f"| `{name}` | {lacks} | `{supported}` |" for name, (lacks, supported) in sorted(REFUSED.items())]
    return _INTRO + "\n".join(rows) + "\n" + _REFUSED + "\n".join(refused) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--markdown"]:
        sys.stdout.write(markdown())
    else:
        raise SystemExit("usage: python -m hetero_megatron.cli.models --markdown")
