"""What generation_config.json says of the next token: every key of transformers' GenerationConfig is honoured, without
effect on the tokens, or refused; what transformers does not know, it does not obey, and that is said."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason, says_nothing

IGNORE = "--ignore-generation-config"
_OR_IGNORE = f"; or {IGNORE}, with which only its ends count"
_OFF = (None, False)
_HONOURED = (
    "eos_token_id sequence_bias encoder_repetition_penalty repetition_penalty no_repeat_ngram_size"
    " encoder_no_repeat_ngram_size bad_words_ids min_length min_new_tokens forced_bos_token_id forced_eos_token_id"
    " remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens stop_strings"
)
_DRAWN = "top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff"  # of draws only
_CACHES = (
    None, "dynamic", "static", "hybrid", "offloaded", "offloaded_static", "offloaded_hybrid", "sliding_window",
    "dynamic_full", "paged",
)  # fmt: skip
KEYS = KeyTable(
    honoured=frozenset(f"{_HONOURED} {_DRAWN} do_sample temperature".split()),
    fixed={
        "num_beams": (1, None), "num_return_sequences": (1, None), "penalty_alpha": (None, 0), "dola_layers": (None,),
        "guidance_scale": (None, 1), "constraints": (None, []), "force_words_ids": (None, []), "token_healing": _OFF,
        "watermarking_config": (None,), "max_time": (None,), "cache_implementation": _CACHES,
    },
    harmless=by_reason(
        {
            "the flag --max-new-tokens counts": "max_length max_new_tokens",
            "ids that no prompt and no answer needs here": "bos_token_id pad_token_id decoder_start_token_id",
            "of beams, which are refused": "early_stopping length_penalty num_beam_groups diversity_penalty low_memory",
            "the most likely token and the distribution stay the same": "renormalize_logits",
            "how a call returns, caches or compiles": (
                "use_cache cache_config max_cache_len prefill_chunk_size compile_config disable_compile output_scores"
                " output_logits output_attentions output_hidden_states return_dict_in_generate return_legacy_cache"
                " continuous_batching_config"
            ),
            "of guessing tokens ahead, which are then checked": (
                "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
                " prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind"
                " target_lookbehind assistant_ensemble_weight speculation_type use_mtp"
            ),
            "who wrote the file": "transformers_version _from_model_config _commit_hash",
        }
    ),
    problem="this way of generating is not supported",
)  # fmt: skip


@dataclass(frozen=True)
class Filters:
    """Which tokens are drawn from, named as in transformers; None: no such limit."""

    top_h: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None


@dataclass(frozen=True)
class ScoreSettings:
    """What changes the scores of the next token, named as in transformers, and ``filters`` of draws.

    ``ends``: ids that end an answer; None: the file does not say it. ``min_new_tokens`` takes the place of
    ``min_length``.
    """

    ends: tuple[int, ...] | None = None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    filters: Filters = field(default_factory=Filters)

    @property
    def changes_scores(self) -> bool:
        """Whether anything but the ends, stops and filters is said."""
        unchanged = ScoreSettings(self.ends, stop_strings=self.stop_strings, filters=self.filters)
        return self != unchanged


def read_settings(config: Mapping[str, Any], vocabulary: int, where: str, draws: bool = True) -> ScoreSettings:
    """The settings of a file.

    Args:
        config: what generation_config.json says, or config.json where there is none.
        vocabulary: ids of the model.
        draws: what tokens are drawn from is read, too.

    Raises:
        UserError: a setting that is refused, or a value that transformers would refuse.
    """
    KEYS.check_fixed(config, where, _OR_IGNORE)
    reader = _Reader({key: value for key, value in config.items() if value is not None}, vocabulary, where)
    decay = reader.value("exponential_decay_length_penalty", None)
    for key in ("forced_bos_token_id", "forced_eos_token_id"):
        if (forced := reader.ids(key)) and set(forced) <= set(reader.ids("suppress_tokens")):
            raise reader.refuse(key, "is also in suppress_tokens", "tokens that may be chosen")
    return ScoreSettings(
        ends=reader.ids("eos_token_id") if "eos_token_id" in reader.values else None,
        sequence_bias=reader.biases(),
        encoder_repetition_penalty=reader.number("encoder_repetition_penalty", 1.0, above=0),
        repetition_penalty=reader.number("repetition_penalty", 1.0, above=0),
        no_repeat_ngram_size=reader.count("no_repeat_ngram_size"),
        encoder_no_repeat_ngram_size=reader.count("encoder_no_repeat_ngram_size"),
        bad_words_ids=reader.sequences("bad_words_ids"),
        min_length=reader.count("min_length"),
        min_new_tokens=reader.count("min_new_tokens") if "min_new_tokens" in reader.values else None,
        forced_bos_token_id=reader.one_id("forced_bos_token_id"),
        forced_eos_token_id=reader.ids("forced_eos_token_id", inside=True),
        remove_invalid_values=reader.switch("remove_invalid_values"),
        exponential_decay_length_penalty=None if decay is None else reader.decay(decay),
        suppress_tokens=reader.ids("suppress_tokens"),
        begin_suppress_tokens=reader.ids("begin_suppress_tokens"),
        stop_strings=reader.texts("stop_strings"),
        filters=_filters(reader) if draws else Filters(),
    )


def _filters(read: _Reader) -> Filters:
    """Values with which transformers filters nothing are None."""
    top_k, min_p = read.count("top_k"), read.number("min_p", 0.0, least=0, most=1)
    top_p, typical = read.number("top_p", 1.0, least=0, most=1), read.number("typical_p", 1.0, above=0)
    shares = {key: read.number(key, 0.0) for key in ("epsilon_cutoff", "eta_cutoff")}
    return Filters(
        top_h=read.number("top_h", 1.0, above=0, most=1) if "top_h" in read.values else None,
        top_k=top_k or None, top_p=top_p if top_p < 1 else None, min_p=min_p or None,
        typical_p=typical if typical < 1 else None, **{k: v if 0 < v < 1 else None for k, v in shares.items()},
    )  # fmt: skip


def notices(config: Mapping[str, Any], where: str, temperature: float | None) -> list[str]:
    """What a user should know: keys that nobody knows, and draws that the file alone asks for.

    Args:
        temperature: --temperature; None: not given.
    """
    messages = []
    if unknown := KEYS.unknown(config):
        messages.append(f"{where}: not known, to transformers neither, and not obeyed: {KEYS.named(unknown)}")
    if temperature is None and config.get("do_sample") is True:
        sep = ", "
        drawing = (key for key in ("temperature", *_DRAWN.split()) if not says_nothing(config.get(key)))
        draws = [f"{key} {config[key]}" for key in drawing]
        messages.append(
            f"{where} says do_sample{f' ({sep.join(draws)[:200]})' if draws else ''}: without --temperature an answer "
            "is made of the most likely tokens"
        )
    return messages


def _is_number(value: Any) -> bool:
    """A finite one, with room for arithmetic in fp32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30


@dataclass(frozen=True)
class _Reader:
    """Values of a file, none of them null, checked."""

    values: Mapping[str, Any]
    vocabulary: int
    where: str

    def refuse(self, key: str, problem: str, accepted: str) -> UserError:
        value = self.values[key]
        return UserError(problem, field=key, value=value, where=self.where, accepted=accepted + _OR_IGNORE)

    def value(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def number(
        self, key: str, default: float, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
    ) -> float:
        number = self.value(key, default)
        if not _is_number(number) or not (number > above and least <= number <= most):
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"from {least:g}"] * (least > -math.inf)
            bounds += [f"to {most:g}"] * (most < math.inf)
            raise self.refuse(key, "is out of range", " ".join(["a number", *bounds]))
        return float(number)

    def count(self, key: str) -> int:
        count = self.value(key, 0)
        if type(count) is not int or not 0 <= count < 2**31:
            raise self.refuse(key, "is no number of tokens", "0 or more")
        return count

    def switch(self, key: str) -> bool:
        switch = self.value(key, False)
        if not isinstance(switch, bool):
            raise self.refuse(key, "is no switch", "true, false")
        return switch

    def ids(self, key: str, inside: bool = False) -> tuple[int, ...]:
        """A token id or a list of them; ``inside``: ids that the model has, where others match nothing."""
        ids = self.value(key, [])
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and (not inside or 0 <= token < self.vocabulary) for token in ids):
            raise self.refuse(key, "is no token id, nor a list of them", self._ids())
        return tuple(ids)

    def one_id(self, key: str) -> int | None:
        if key not in self.values:
            return None
        ids = self.ids(key, inside=True)
        if len(ids) != 1 or isinstance(self.values[key], list):
            raise self.refuse(key, "is no token id", self._ids())
        return ids[0]

    def _ids(self) -> str:
        return f"ids from 0 to {self.vocabulary - 1}"

    def _sequence(self, key: str, value: Any) -> tuple[int, ...]:
        are_ids = isinstance(value, list) and all(type(i) is int and 0 <= i < self.vocabulary for i in value)
        if not are_ids or not value:
            raise self.refuse(key, "holds something else than token ids", f"lists of {self._ids()}")
        return tuple(value)

    def sequences(self, key: str) -> tuple[tuple[int, ...], ...]:
        lists = self.value(key, [])
        if not isinstance(lists, list):
            raise self.refuse(key, "is no list", f"lists of {self._ids()}")
        return tuple(dict.fromkeys(self._sequence(key, ids) for ids in lists))

    def biases(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        key = "sequence_bias"
        pairs, biases = self.value(key, []), dict[tuple[int, ...], float]()
        for pair in pairs if isinstance(pairs, list) else [None]:
            if not isinstance(pair, list) or len(pair) != 2 or not _is_number(pair[1]):
                raise self.refuse(key, "is no list of sequences and numbers", "[[[id, ...], number], ...]")
            biases[self._sequence(key, pair[0])] = float(pair[1])
        return tuple(biases.items())

    def decay(self, value: Any) -> tuple[int, float]:
        is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and abs(value[0]) < 2**31
        if not is_pair or not _is_number(value[1]) or value[1] <= 0:
            raise self.refuse("exponential_decay_length_penalty", "is no start and factor", "[tokens, factor above 0]")
        return value[0], float(value[1])

    def texts(self, key: str) -> tuple[str, ...]:
        texts = self.value(key, [])
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise self.refuse(key, "is no list of texts", '["text", ...]')
        return tuple(texts)
