"""What a plan was made for: part of its file, not of its fingerprint, as it changes no numbers of a run by itself.

It gives the defaults of a run with the plan, and what is asked for otherwise is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero_megatron.cluster.catalogue import DTYPES
from hetero_megatron.errors import UserError
from hetero_megatron.plans.fp8 import FORMATS, RECIPES, Fp8
from hetero_megatron.spec.lora import Lora, sites_of
from hetero_megatron.utils.text import format_bytes, plural

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec
    from hetero_megatron.utils.yaml_document import Entry

# What of adapters counts for memory and time: field -> key of the section, which is the flag's too.
LORA_KEYS = {
    "rank": "lora_rank", "targets": "lora_targets", "dropout": "lora_dropout", "base_dtype": "lora_base_dtype",
    "dora": "use_dora", "sites": "lora_sites",
}  # fmt: skip
KEYS = (
    "model", "model_hash", "dtype", "optimizer", "memory", "fp8_format", "fp8_recipe", "mtp_num_layers",
    *LORA_KEYS.values(),
)  # fmt: skip
OPTIMIZERS = ("adam", "sgd", "muon")


@dataclass(frozen=True)
class MadeFor:
    """``model_hash``: of what counts for memory and time (:func:`model_hash`); ``memory``: bytes per chip name. The
    optimizer's bytes follow from ``optimizer`` and ``dtype``: an fp32 master of each 16-bit element, and moments as
    wide (Adam two, SGD one, Muon one of matrices). ``fp8``: what its stages in fp8 were planned with; None: not said.
    ``lora``: adapters; their alpha is the run's. ``mtp_layers``: modules that predict further tokens."""

    model: str
    model_hash: str
    dtype: str
    optimizer: str
    memory: tuple[tuple[str, int], ...] = ()
    fp8: Fp8 | None = None
    lora: Lora | None = None
    mtp_layers: int = 0

    def plain(self) -> dict[str, Any]:
        """As a plan file has it."""
        fp8 = {} if self.fp8 is None else {"fp8_format": self.fp8.format, "fp8_recipe": self.fp8.recipe}
        return {
            "model": self.model, "model_hash": self.model_hash, "dtype": self.dtype, "optimizer": self.optimizer,
            "memory": dict(self.memory), **fp8,
            **({"mtp_num_layers": self.mtp_layers} if self.mtp_layers else {}),
            **({} if self.lora is None else lora_keys(self.lora)),
        }  # fmt: skip

    def agree(self, key: str, field: str, value: str, source: str) -> None:
        """UserError for a run that asks for another ``dtype`` or ``optimizer``."""
        planned = getattr(self, key)
        if value != planned:
            raise UserError(
                f"the plan was made for {planned} (made_for.{key} of {source})", field=field, value=value,
                accepted=f"{planned}, or a plan made for {value}", where="command line",
            )  # fmt: skip

    def agree_on_fp8(self, asked: Fp8, source: str) -> None:
        """UserError for a run in another fp8."""
        if self.fp8 not in (None, asked):
            raise UserError(
                f"the plan was made for {self.fp8} (made_for of {source})", field="--fp8-format", value=str(asked),
                accepted=f"{self.fp8}, or a plan made for {asked}", where="command line",
            )  # fmt: skip

    def agree_on_model(self, model: ModelSpec, source: str) -> None:
        """UserError for a model that differs in what counts, adapters among it; its name does not."""
        if model_hash(model) != self.model_hash:
            if model_hash(self.with_predictions(model)) == self.model_hash:
                modules = plural(self.mtp_layers, "module")
                raise UserError(
                    f"the plan was made for {modules} that predict further tokens (made_for of {source})",
                    field="--mtp-num-layers", value=model.mtp_layers, where="command line",
                    accepted=f"{self.mtp_layers}, or a plan made for {model.mtp_layers}",
                )  # fmt: skip
            if model_hash(replace(model, lora=self.lora)) == self.model_hash:
                raise self._other_adapters(model.lora, source)
            raise UserError(
                f"the plan was made for another model: {self.model} ({self.model_hash})", field="model",
                value=f"{model.name} ({model_hash(model)})", where=source,
                accepted=f"{self.model}, or a plan made for {model.name}",
            )  # fmt: skip

    def with_predictions(self, model: ModelSpec) -> ModelSpec:
        """The model with as many modules that predict further tokens as the plan's, where it may have such."""
        allowed = model.position == "rope" and model.lora is None
        return replace(model, mtp_layers=self.mtp_layers) if allowed else model

    def _other_adapters(self, asked: Lora | None, source: str) -> UserError:
        """The refusal of adapters that differ from the plan's, by the first flag that does."""
        plan_keys, run_keys = ({} if lora is None else lora_keys(lora) for lora in (self.lora, asked))
        key = next(key for key in LORA_KEYS.values() if plan_keys.get(key) != run_keys.get(key))
        plan_words, run_words = (lora_words(lora) if lora is not None else [] for lora in (self.lora, asked))
        made_with, other_with = (
            f"with {' '.join(words)}" if words else "without adapters" for words in (plan_words, run_words)
        )
        return UserError(
            f"the plan was made {made_with} (made_for of {source})", field=f"--{key.replace('_', '-')}",
            value=run_keys.get(key, "not given"), accepted=f"the run {made_with}, or a plan made {other_with}",
            where="command line",
        )  # fmt: skip

    def less_memory(self, cluster: Cluster, ranks: Iterable[int], source: str) -> UserError | None:
        """What to raise where chips of the ranks have less memory in this cluster than the plan was made for."""
        memory_of = {chip.name: chip.memory for chip in map(cluster.chip_of, ranks)}
        smaller = [(name, memory_of[name], size) for name, size in self.memory if memory_of.get(name, size) < size]
        if not smaller:
            return None
        texts = [
            f"{name} has {format_bytes(size_now)}, not {format_bytes(size)}" for name, size_now, size in smaller
        ]
        return UserError(
            f"the plan was made for chips with more memory: {'; '.join(texts)}", field="made_for.memory", where=source,
            accepted="a plan made for this cluster file, or --allow-over-memory to go on",
        )  # fmt: skip

    def known_model(self) -> str | None:
        """What ``--model`` would say: a preset, or a file or directory that is there."""
        from hetero_megatron.spec.presets import preset_names

        return self.model if self.model in preset_names() or os.path.exists(self.model) else None


def model_hash(model: ModelSpec) -> str:
    """12 hex digits of the shapes of a model. Positions that are not learned, and constants, are not in it."""
    return hashlib.sha256(json.dumps(model.shape(), sort_keys=True).encode()).hexdigest()[:12]


def lora_keys(lora: Lora) -> dict[str, Any]:
    """Adapters as the section has them: what is off is left out."""
    values = as_flags(lora)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value}


def as_flags(lora: Lora, places: Collection[str] = ()) -> dict[str, Any]:
    """By flag's key, what a run with these adapters is given; ``places``: keys of flags about which projections have
    some that were given already, beside which the plan's say nothing."""
    values = {key: getattr(lora, name) for name, key in LORA_KEYS.items()} | {LORA_KEYS["sites"]: lora.site_words()}
    return {key: value for key, value in values.items() if not places or key not in ("lora_targets", "lora_sites")}


def lora_words(lora: Lora) -> list[str]:
    """The flags that ask for such adapters."""
    words: list[str] = []
    for key, value in lora_keys(lora).items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{key.replace('_', '-')}", *map(str, values)]
    return words


def made_for(
    model: ModelSpec, dtype: str, optimizer: str, cluster: Cluster, ranks: Iterable[int], fp8: Fp8 | None = None
) -> MadeFor:
    """Of a plan on these ranks of a cluster."""
    chips = {chip.name: chip.memory for chip in map(cluster.chip_of, ranks)}
    memory = tuple(sorted(chips.items()))
    return MadeFor(model.name, model_hash(model), dtype, optimizer, memory, fp8, model.lora, model.mtp_layers)


def read_made_for(entry: Entry) -> MadeFor:
    """The section ``made_for`` of a plan file."""
    keys = entry.mapping(KEYS, required=("model", "model_hash", "dtype", "optimizer"))
    memory = keys["memory"].any_mapping() if "memory" in keys else {}
    if ("fp8_format" in keys) != ("fp8_recipe" in keys):
        entry.fail("it says only one of fp8_format and fp8_recipe", accepted="both, or none")
    fp8 = Fp8(keys["fp8_format"].choice(FORMATS), keys["fp8_recipe"].choice(RECIPES)) if "fp8_format" in keys else None
    return MadeFor(
        keys["model"].text(),
        keys["model_hash"].text(),
        keys["dtype"].choice(DTYPES),
        keys["optimizer"].choice(OPTIMIZERS),
        tuple(sorted((name, value.integer(1)) for name, value in memory.items())),
        fp8,
        _read_lora(entry, keys),
        keys["mtp_num_layers"].integer(0) if "mtp_num_layers" in keys else 0,
    )


def _read_lora(entry: Entry, keys: dict[str, Entry]) -> Lora | None:
    if "lora_rank" not in keys:
        for key in LORA_KEYS.values():
            if key in keys:
                keys[key].fail("it needs lora_rank beside it")
        return None
    if "lora_targets" not in keys:
        entry.fail("lora_rank is given without lora_targets", accepted="both, or none")
    rank, dropout, base = keys["lora_rank"].integer(), keys.get("lora_dropout"), keys.get("lora_base_dtype")
    try:
        return Lora(
            rank, float(rank) or 1.0, tuple(item.text() for item in keys["lora_targets"].items()),
            dropout=0.0 if dropout is None else dropout.number(0, 1), base_dtype=None if base is None else base.text(),
            dora="use_dora" in keys and keys["use_dora"].flag(),
            sites=sites_of([item.text() for item in keys["lora_sites"].items()] if "lora_sites" in keys else [], rank),
        )  # fmt: skip
    except UserError as error:
        if error.field not in LORA_KEYS:  # it names the key already
            raise
        keys[LORA_KEYS[error.field]].fail(error.problem, error.accepted)
