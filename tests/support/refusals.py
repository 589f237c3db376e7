"""What a refusal names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hetero_megatron.errors import UserError


@contextmanager
def refused(field: str, *words: str) -> Iterator[None]:
    """The block is refused for what was given as ``field``, in a message that has all of ``words``."""
    with pytest.raises(UserError) as caught:
        yield
    assert caught.value.field == field, caught.value
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value}: without {missing}"
