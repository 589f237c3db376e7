"""Methods whose results are kept, per object and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class cached_method(Generic[P, T]):
    """``functools.cache`` for methods, as ``cached_property`` is for properties: the results live as long as their
    object. Arguments must be hashable."""

    def __init__(self, function: Callable[Concatenate[Any, P], T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        kept: Any = cache(self.function.__get__(instance))
        instance.__dict__[self.function.__name__] = kept  # found there before this descriptor from now on
        return kept  # type: ignore[no-any-return]
