"""Hetero-Megatron: one language model, trained across whatever accelerators you have.

    import hetero_megatron as hm

    cluster = hm.Cluster.read("cluster.yaml")
    found = hm.plan("llama3-8b", cluster, seq_length=4096, global_batch_size=64)
    print(found.explain())

What is listed in ``__all__`` is the library's face, and stable; everything else belongs to the program. Nothing here
imports torch before ``train`` or ``generate`` is called; types are in ``__init__.pyi``.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"  # setup.py reads it, too
__all__ = [
    "Answer",
    "Cluster",
    "Comparison",
    "Found",
    "FoundApart",
    "FoundFor",
    "Memory",
    "Model",
    "Offers",
    "Plan",
    "Prediction",
    "Trained",
    "UserError",
    "__version__",
    "generate",
    "memory",
    "plan",
    "predict",
    "shop",
    "train",
]
_MODULES = {
    "api.inputs": ("Cluster", "Model"),
    "api.jobs": ("Answer", "Trained", "generate", "train"),
    "api.plans": ("Comparison", "Memory", "Plan", "Prediction", "memory", "predict"),
    "api.search": ("Found", "FoundApart", "FoundFor", "plan"),
    "api.shop": ("Offers", "shop"),
    "errors": ("UserError",),
}
_HOME = {name: f"hetero_megatron.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Imported when it is first asked for: the command line starts without it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
