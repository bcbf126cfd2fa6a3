"""Distributed dynamic sparse attention for ultra-long context training.

    pattern = mtraining.VerticalSlash(p_vertical=0.9, p_slash=0.9)
    out = mtraining.sparse_attention(q, k, v, pattern=pattern)

Names are loaded when they are first used: importing this package alone needs neither torch nor the built library. docs/python.md
shows them at work.
"""

import importlib

_WHERE = {
    "VerticalSlash": "pattern",
    "Dense": "pattern",
    "XAttention": "pattern",
    "Moba": "pattern",
    "Index": "index",
    "BlockIndex": "blocks",
    "block_index": "blocks",
    "build_index": "ops",
    "attend": "ops",
    "sparse_attention": "ops",
    "ring_attention": "ring",
    "shard": "layout",
    "unshard": "layout",
    "positions": "layout",
}
_MODULES = ("blocks", "hf", "index", "layout", "library", "ops", "pattern", "ring")

__all__ = [*_WHERE, "hf"]


def __getattr__(name: str):
    if name in _WHERE:
        value = getattr(importlib.import_module(f"mtraining.{_WHERE[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mtraining.{name}")
    else:
        raise AttributeError(f"module 'mtraining' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *_MODULES})
