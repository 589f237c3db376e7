"""Hostile words in every place of a cluster file: no option, file, or expansion comes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_megatron.cluster.cluster_file import CHIP_KEYS, LINK_KEYS, NODE_KEYS
from hetero_megatron.cluster.hosts import LAUNCH_KEYS
from tests.support.cluster_words import BASE, HOSTILE, check_word, places

words = st.one_of(
    st.sampled_from(HOSTILE),
    st.text("ab1-._/ $(){}'\"`;|&<>\n\t\\@%:,=#~!*", max_size=12),
    st.builds("{}{}".format, st.sampled_from(HOSTILE), st.text("ab-/$", max_size=3)),
)


def test_every_key_of_a_cluster_file_is_tried() -> None:
    found = {key for path in places(BASE) for key in path if isinstance(key, str)}
    assert found >= {*NODE_KEYS, *CHIP_KEYS, *LINK_KEYS, *LAUNCH_KEYS}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(place=st.sampled_from(sorted(places(BASE), key=str)), word=words)
def test_hostile_words(place: tuple[Any, ...], word: str, tmp_path_factory: Any) -> None:
    check_word(place, word, tmp_path_factory.getbasetemp())


def test_hostile_words_in_every_place(tmp_path: Path) -> None:
    """Without a shell: every word in some places, and some words in every place."""
    for index, place in enumerate(places(BASE)):
        for word in HOSTILE[index % 16 :: 16]:
            check_word(place, word, tmp_path, shells=False)
