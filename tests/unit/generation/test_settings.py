"""Settings of generation_config.json: every key of transformers is in the table, and what is honoured gives the same
tokens, token for token, and the same distributions."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hetero_megatron.errors import UserError
from hetero_megatron.generation.sampling import PromptRow, Sampling, filtered
from hetero_megatron.generation.settings import KEYS, ScoreSettings, notices, read_settings

VOCAB, NEW = 40, 11
PROMPTS = ([3], [5, 9, 5, 9, 2, 30, 31], list(range(10, 22)))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_every_key_of_transformers_is_in_the_table() -> None:
    known = set(GenerationConfig().to_dict()) | set(GenerationConfig._get_default_generation_params())
    assert not known - KEYS.accepted_keys


def theirs(model: Any, prompt: list[int], said: dict[str, Any], tokenizer: Any = None) -> list[int]:
    model.generation_config = GenerationConfig(pad_token_id=0, **said)
    more = {} if tokenizer is None else {"tokenizer": tokenizer}
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, **more)
    return out[0, len(prompt) :].tolist()


def ours(model: Any, prompt: list[int], said: dict[str, Any]) -> list[int]:
    settings = read_settings(said, VOCAB, "generation_config.json")
    row = PromptRow(0, prompt, [], NEW)
    sampling = Sampling(settings=settings, ends=settings.ends or ())
    with torch.no_grad():
        while len(row.answer) < NEW and not (row.answer and row.answer[-1] in sampling.ends):
            logits = model(torch.tensor([row.ids])).logits[:, -1]
            row.answer.append(int(sampling.choose(logits, [row])[0]))
    return row.answer


ALONE: dict[str, list[Any]] = {
    "eos_token_id": [7, [7, 12], []],
    "sequence_bias": [
        [[[4], 6.0]], [[[9, 2], -8.0], [[11], 3.5], [[11], 2.0]], [[[5, 9, 5], 9.0], [[2, 2, 2, 2], 9.0]],
    ],
    "encoder_repetition_penalty": [0.4, 2.5],
    "repetition_penalty": [1.3, 0.6, 4.0],
    "no_repeat_ngram_size": [1, 2, 3, 40],
    "encoder_no_repeat_ngram_size": [1, 2, 5],
    "bad_words_ids": [[[1], [2], [3]], [[4, 4], [30, 31, 5], [7]]],
    "min_length": [4, 12, 30],
    "min_new_tokens": [0, 3, 20],
    "forced_bos_token_id": [6],
    "forced_eos_token_id": [8, [8, 9]],
    "remove_invalid_values": [True, False],
    "exponential_decay_length_penalty": [[2, 1.6], [0, 1.01], [-3, 3.0]],
    "suppress_tokens": [list(range(0, 40, 2)), [1, 500, -3]],
    "begin_suppress_tokens": [list(range(0, 40, 3)), [2]],
}


def first_tokens(model: Any) -> list[int]:
    """Tokens that greedy answers are full of, for settings that would otherwise change nothing."""
    return [token for prompt in PROMPTS for token in theirs(model, prompt, {})]


@pytest.mark.slow
def test_each_setting_and_combinations_give_transformers_tokens(model: Any) -> None:
    tokens = first_tokens(model)
    common = [list(pair) for pair in itertools.pairwise(tokens)]
    values = ALONE | {
        "eos_token_id": [*ALONE["eos_token_id"], tokens[3], [tokens[5], tokens[-2]]],
        "suppress_tokens": [*ALONE["suppress_tokens"], tokens[:2]],
        "begin_suppress_tokens": [*ALONE["begin_suppress_tokens"], tokens],
        "bad_words_ids": [*ALONE["bad_words_ids"], common[:6]],
        "sequence_bias": [*ALONE["sequence_bias"], [[pair, -5.0] for pair in common[:9]]],
    }
    assert values.keys() | {"stop_strings"} == KEYS.honoured - {
        "do_sample", "temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"
    }  # fmt: skip
    cases = [{key: value} for key, several in values.items() for value in several]
    rng = random.Random(5)
    for _ in range(10):
        keys = rng.sample(sorted(values), rng.randint(2, 6))
        said = {key: rng.choice(values[key]) for key in keys}
        if 8 not in said.get("suppress_tokens", ()) or "forced_eos_token_id" not in said:
            cases.append(said)
    changed, plain = set[str](), {}
    for number, said in enumerate(cases):
        if "exponential_decay_length_penalty" in said and not said.get("eos_token_id"):
            said["eos_token_id"] = tokens[7]  # transformers fails without an end
        for prompt in PROMPTS if len(said) == 1 else PROMPTS[number % 3 :][:1]:
            wanted = theirs(model, prompt, said)
            assert ours(model, prompt, said) == wanted, (said, prompt)
            if len(said) == 1:
                plain.setdefault(len(prompt), theirs(model, prompt, {}))
                changed |= said.keys() if wanted != plain[len(prompt)] else set()
    needs_an_end = {"min_length", "min_new_tokens", "exponential_decay_length_penalty", "remove_invalid_values"}
    assert changed >= values.keys() - needs_an_end


FILTERS: list[dict[str, Any]] = [
    {"top_k": 5}, {"top_k": 1}, {"top_k": 500}, {"top_p": 0.7}, {"top_p": 0.05}, {"min_p": 0.2}, {"min_p": 1.0},
    {"typical_p": 0.5}, {"typical_p": 0.05}, {"epsilon_cutoff": 0.05}, {"epsilon_cutoff": 0.9}, {"eta_cutoff": 0.1},
    {"top_h": 0.5}, {"top_h": 0.05}, {"top_k": 8, "top_p": 0.8}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    {"top_h": 0.9, "top_k": 12, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.01,
     "eta_cutoff": 0.02}, {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0},
]  # fmt: skip


def test_draws_are_from_transformers_distributions(model: Any) -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB) * 2
    logits[1, 3:20] = -torch.inf
    for said, temperature in itertools.product(FILTERS, (1.0, 0.6)):
        config = GenerationConfig(do_sample=True, temperature=temperature, **{"top_k": 0, **said})
        config.update(top_k=0, top_p=1.0, typical_p=1.0, num_beams=1, defaults_only=True)
        made = model._get_logits_processor(config, input_ids_seq_length=2, device="cpu")
        wanted = made(torch.zeros(6, 2, dtype=torch.int64), logits.clone()).softmax(-1)
        found = filtered(logits.double() / temperature, read_settings(said, VOCAB, "x").filters).softmax(-1)
        assert torch.allclose(found.float(), wanted, atol=1e-5), (said, temperature)


def test_draws_have_the_frequencies_of_the_distribution_and_depend_on_prompt_and_step_only() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 12) * 2
    filters = read_settings({"top_p": 0.8}, 12, "x").filters
    wanted = filtered(logits.double() / 0.7, filters).softmax(-1)[0]
    sampling, count = Sampling(0.7, filters, seed=3), 4000
    rows = [PromptRow(i, [1], [0] * 5, 9) for i in range(count)]
    drawn = sampling.choose(logits.expand(count, -1), rows)
    seen = torch.bincount(drawn, minlength=12) / count
    assert (seen[wanted == 0] == 0).all() and (seen - wanted).abs().max() < 0.03
    assert torch.equal(drawn[7:9], sampling.choose(logits.expand(2, -1), rows[7:9]))


def test_any_temperature_is_a_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 30) * 5
    rows = [PromptRow(i, [1], [], 9) for i in range(4)]
    for temperature in (1e-5, 1e-20, 1e-300, 1e-308, 1e-320, 5e-324):
        assert torch.equal(Sampling(temperature).choose(logits, rows), logits.argmax(-1)), temperature
    for temperature in (1e20, 1e308, 1.7976931348623157e308):
        assert (((drawn := Sampling(temperature).choose(logits, rows)) >= 0) & (drawn < 30)).all()
    nothing = torch.full((2, 30), -torch.inf)
    nothing[1] = torch.nan
    for temperature in (0.0, 1e-308, 1.0, 1e308):
        assert Sampling(temperature).choose(nothing, rows[:2]).tolist() == [0, 0]


BAD: dict[str, list[Any]] = {
    "num_beams": [4, "1"], "num_return_sequences": [3], "penalty_alpha": [0.6], "dola_layers": ["high"],
    "guidance_scale": [1.5], "constraints": [[1]], "force_words_ids": [[[1]]], "token_healing": [True],
    "watermarking_config": [{"bias": 2.0}], "max_time": [3.0], "cache_implementation": ["quantized"],
    "repetition_penalty": [0, -1.0, "1.2", True, float("inf"), float("nan")], "encoder_repetition_penalty": [0.0],
    "no_repeat_ngram_size": [-1, 1.5, "2"], "bad_words_ids": [[1], [[]], [[-1]], [[VOCAB]], "x"],
    "sequence_bias": [[[[1], "x"]], [[[99], 1.0]], [[[], 1.0]], {"1": 2.0}, [[[1], float("inf")]]],
    "eos_token_id": ["7", 1.0, [True], [None]], "forced_eos_token_id": [VOCAB, [-1]], "forced_bos_token_id": [[1], -1],
    "suppress_tokens": ["1", [1.5]], "min_length": [-1, 1e3], "min_new_tokens": ["3"], "stop_strings": [[""], [1]],
    "exponential_decay_length_penalty": [[1], [1.5, 2.0], [1, 0], 3], "remove_invalid_values": [1],
    "top_k": [-1, 2.0], "top_p": [1.5, -0.1], "min_p": [2], "typical_p": [0], "top_h": [0, 1.5],
    "epsilon_cutoff": ["x"], "eta_cutoff": [[1]],
}  # fmt: skip


def test_what_is_not_supported_is_refused_by_name() -> None:
    assert KEYS.fixed.keys() <= BAD.keys()
    for key, several in BAD.items():
        for value in several:
            with pytest.raises(UserError, match=key) as raised:
                read_settings({key: value}, VOCAB, "generation_config.json")
            assert raised.value.field == key and "--ignore-generation-config" in raised.value.accepted
    with pytest.raises(UserError, match="also in suppress_tokens"):
        read_settings({"forced_eos_token_id": 3, "suppress_tokens": [1, 3]}, VOCAB, "x")
    assert read_settings({"top_k": -1, "min_p": 7}, VOCAB, "x", draws=False) == ScoreSettings()


def test_unknown_keys_and_draws_of_the_file_alone_are_said() -> None:
    said = {"repetition_penality": 1.2, "chat_format": "chatml", "do_sample": True, "top_p": 0.8, "max_length": 4096}
    told = " | ".join(notices(said, "generation_config.json", None))
    assert "repetition_penality (did you mean repetition_penalty?)" in told and "chat_format" in told
    assert "do_sample (top_p 0.8)" in told and "max_length" not in told
    assert "do_sample" not in " ".join(notices(said, "x", 0.0))
    assert not notices({"do_sample": False, "eos_token_id": 3}, "x", None)
