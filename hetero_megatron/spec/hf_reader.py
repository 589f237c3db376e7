"""Typed access to a Hugging Face ``config.json``: every refusal names key, value and file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.spec.hf_keys import require_one_of
from hetero_megatron.spec.model_spec import MAX_SIZE

Config = Mapping[str, Any]
MISSING = object()
MAX_NUMBER = 1e30


class ConfigReader:
    """One object of a configuration.

    ``null`` is not the same as absent: transformers refuses it for most keys. Those for which it means something
    say so (``nullable``).
    """

    def __init__(self, config: Config, where: str, prefix: str = "") -> None:
        self.config, self.where, self.prefix = config, where, prefix

    def refuse(self, problem: str, key: str, accepted: str) -> UserError:
        if key not in self.config:
            return UserError(f"missing, and {problem}", field=self.prefix + key, accepted=accepted, where=self.where)
        value = self.config[key]
        return UserError(problem, field=self.prefix + key, value=value, accepted=accepted, where=self.where)

    def value(self, key: str, default: Any, nullable: bool = False) -> Any:
        value = self.config.get(key, MISSING)
        return default if value is MISSING or (nullable and value is None) else value

    def integer(
        self, key: str, default: int | None = None, nullable: bool = False, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        value = self.value(key, default, nullable)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            problem = "must be a positive integer" if least else "must be an integer"
            quoted = ", without quotation marks" if isinstance(value, str) else ""
            raise self.refuse(problem, key, f"{least} to {most}{quoted}")
        return value

    def positive(self, key: str, default: float | None = None, nullable: bool = False) -> float:
        value = self.value(key, default, nullable)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
            raise self.refuse("must be a positive number", key, f"a number above 0 and below {MAX_NUMBER:g}")
        return float(value)

    def optional(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or ``null`` for none."""
        return None if self.value(key, default) is None else self.positive(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse("must be true or false", key, "true or false")
        return value

    def must_be(self, key: str, *accepted: Any) -> None:
        """Refuse any value of ``key`` but these (or absence)."""
        if key in self.config:
            require_one_of(self.config[key], accepted, self.prefix + key, self.where)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        found = self.value(key, None)
        ok = isinstance(found, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < MAX_NUMBER for x in found
        )
        if not ok:
            raise self.refuse("must be a list of positive numbers", key, "numbers above 0")
        return tuple(float(x) for x in found)
