"""Methods whose results are kept, per object and arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class cached_method(Generic[P, T]):
    """``functools.cache`` for methods, as ``cached_property`` is for properties: the results live as long as their
    object. Arguments must be hashable."""

    def __init__(
        self, function: Callable[Concatenate[Any, P], T], key: Callable[..., Hashable] | None = None
    ) -> None:
        self.function, self.key, self.__doc__ = function, key, function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[P, T]:
        method: Any = self.function.__get__(instance)
        kept: Any = cache(method) if self.key is None else _by_key(method, self.key)
        instance.__dict__[self.function.__name__] = kept  # found there before this descriptor from now on
        return kept  # type: ignore[no-any-return]


def cached_by(key: Callable[..., Hashable]) -> Callable[[Callable[Concatenate[Any, P], T]], cached_method[P, T]]:
    """:class:`cached_method` for methods whose results only depend on ``key(*arguments)``, given by position."""
    return lambda function: cached_method(function, key)


def share_results(of: object, to: object, *methods: str) -> None:
    """Make ``to`` use the kept results of ``of``, for methods that do not depend on what the two differ in."""
    for name in methods:
        to.__dict__[name] = getattr(of, name)


def _by_key(method: Callable[..., T], key: Callable[..., Hashable]) -> Callable[..., T]:
    results: dict[Hashable, T] = {}

    def kept(*args: Any) -> T:
        call_key = key(*args)
        if call_key not in results:
            results[call_key] = method(*args)
        return results[call_key]

    return kept
