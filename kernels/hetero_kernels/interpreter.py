"""Triton's interpreter, in less time: it takes most of a program's for preparing the same again.

Each call of a function by a kernel looks through all names of ``triton.language`` for those to be replaced while a
kernel runs, though its launch has replaced them; each look at a dtype makes a table of all of them. What kernels
compute stays as it is. A version of Triton that has other parts is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

PARTS = ("_patch_lang", "_patch_builtin", "_patch_attr", "_LangPatchScope", "_get_np_dtype", "GridExecutor")


class Replacements:
    """Which modules of the language the launches that run have replaced already."""

    def __init__(self) -> None:
        self.launch, self.patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
        self.live: set[int] = set()
        self.languages: dict[Callable[..., Any], set[int]] = {}
        self.builtins: dict[Any, list[tuple[str, Any]]] = {}

    def replace(self, function: Callable[..., Any]) -> Any:
        """In place of ``_patch_lang``."""
        used = self.languages.get(function)
        if used is None:
            values = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
            used = self.languages[function] = {id(value) for value in values if value in (tl, tl.core)}
        if used and used <= self.live:
            return interpreter._LangPatchScope()  # with nothing to restore
        self.live |= used
        return self.patch(function)

    def replace_builtins(self, owner: Any, builder: Any, scope: Any) -> None:
        """In place of ``_patch_builtin``. What a launch did not restore has no mark of a builtin, and is left alone."""
        if owner not in self.builtins:
            self.builtins[owner] = [(name, getattr(owner, name)) for name in dir(owner)]
            self.builtins[owner] = [(n, member) for n, member in self.builtins[owner] if tl.core.is_builtin(member)]
        for name, member in self.builtins[owner]:
            if tl.core.is_builtin(getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, builder, scope)

    def run(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        """In place of a launch's ``__call__``."""
        before, self.live = self.live, set()
        try:
            self.launch(executor, *args, **kwargs)
        finally:
            self.live = before


def quicken() -> None:
    """Once per process, where kernels are interpreted."""
    if not all(hasattr(interpreter, name) for name in PARTS) or hasattr(interpreter, "hetero_replacements"):
        return
    replacements = interpreter.hetero_replacements = Replacements()
    interpreter._patch_lang = replacements.replace
    interpreter._patch_builtin = replacements.replace_builtins
    interpreter.GridExecutor.__call__ = lambda executor, *args, **kwargs: replacements.run(executor, *args, **kwargs)
    plain, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return plain(dtype)
        if scalar.name not in known:
            known[scalar.name] = plain(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpy_dtype
