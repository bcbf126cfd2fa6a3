"""Patterns: which (query, key) pairs are worth computing. Plain data; the choice itself is made by build_index or ring_attention."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Dense:
    """Every causal pair."""


@dataclasses.dataclass(frozen=True)
class VerticalSlash:
    """Columns (verticals) and block diagonals (slashes), chosen online for each sample and query head from the last rows of q.

    A keyword for each key of the configuration's [attention] table that belongs to the pattern; the same defaults.

    Args:
        p_vertical: share in [0, 1] of the observed attention that the chosen columns cover; 1 takes every column.
        p_slash: share in [0, 1] that the chosen block diagonals (64 x 64 tokens) cover; 1 takes every diagonal.
        last_q: observation rows, 1 .. 4096.
        window: where these rows are: "last" ones of the sequence, or "strided" over it (ours).
        slash_pooling: "block" pools offsets to block diagonals and chooses among them; "paper" takes its budget from the pooled
            scores and the best single offsets; "token" chooses offsets directly.
        selection: "head", or "kv_group" where the query heads of a key/value head share one choice (ours).
        sink_tokens: first tokens of each document that are always columns (ours).
        local_blocks: nearest block diagonals that are always on, at least 1 (ours: 2).
        max_columns, max_diagonals: caps a head on what is chosen beyond the forced ones; None: no cap. max_columns also bounds
            the capacity of an index's tensors.
        dense_threshold: a head whose index costs at least this share of its causal pairs becomes dense; 1: off.
        recall_floor: a head whose recall on sampled rows is below this becomes dense; 0: off.
        recall_rows: how many rows are sampled for that, 1 .. 4096.

    Errors: ValueError naming the keyword, its range and the value.
    Source: MTraining, arXiv 2510.18830, Algorithm 1.
    """

    p_vertical: float = 0.9
    p_slash: float = 0.9
    last_q: int = 64
    window: str = "last"
    slash_pooling: str = "block"
    selection: str = "head"
    sink_tokens: int = 64
    local_blocks: int = 2
    max_columns: int | None = None
    max_diagonals: int | None = None
    dense_threshold: float = 0.8
    recall_floor: float = 0.0
    recall_rows: int = 256

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = _KINDS[field.type]
            if isinstance(value, bool) or not isinstance(value, wanted):
                raise ValueError(f"{field.name}: expected {_SAID[field.type]}, got {value!r}")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError(f"{field.name}: expected a number below 2^63, got a larger one")
        from mtraining.library import ops

        ops.check_pattern(*self.arguments())

    def arguments(self) -> tuple:
        """The values in the order of the operators' arguments."""
        return (
            self.p_vertical,
            self.p_slash,
            self.last_q,
            self.window,
            self.slash_pooling,
            self.selection,
            self.sink_tokens,
            self.local_blocks,
            self.max_columns,
            self.max_diagonals,
            self.dense_threshold,
            self.recall_floor,
            self.recall_rows,
        )


@dataclasses.dataclass(frozen=True)
class XAttention:
    """Blocks chosen one by one for each query head, from all of q and k: scores of groups of tokens along antidiagonals. A baseline.

    Args:
        xattention_block: tokens of a block that is chosen or not; a multiple of 64 and of the stride.
        xattention_stride: tokens of a group.
        xattention_threshold: share in [0, 1] of the estimated attention that the chosen blocks of a query block hold. Its own block and the
            first one of its document are always chosen.

    Cost of the choice: S^2 D / stride multiply-adds a head. Errors: ValueError naming the keyword, its range and the value.
    """

    xattention_block: int = 128
    xattention_stride: int = 16
    xattention_threshold: float = 0.9

    def __post_init__(self):
        _check_types(self)
        from mtraining.library import ops

        ops.check_xattention(*self.arguments())

    def arguments(self) -> tuple:
        """The values in the order of the operators' arguments."""
        return self.xattention_block, self.xattention_stride, self.xattention_threshold


@dataclasses.dataclass(frozen=True)
class Moba:
    """Chunks of keys chosen for each 64 queries and query head by (mean of q) . (mean of the chunk's k). A baseline.

    Args:
        moba_chunk: tokens of a chunk, a multiple of 64.
        moba_top_k: chunks of a query block, its own (up to itself, always on) counted.

    Errors: ValueError naming the keyword, its range and the value.
    """

    moba_chunk: int = 4096
    moba_top_k: int = 12

    def __post_init__(self):
        _check_types(self)
        from mtraining.library import ops

        ops.check_moba(*self.arguments())

    def arguments(self) -> tuple:
        """The values in the order of the operators' arguments."""
        return self.moba_chunk, self.moba_top_k


_KINDS = {
    float: (int, float),
    int: (int,),
    str: (str,),
    int | None: (int, type(None)),
}
_SAID = {float: "a number", int: "an int", str: "a string", int | None: "an int or None"}

Pattern = Dense | VerticalSlash | XAttention | Moba


def checked(pattern) -> Pattern:
    """The pattern itself; None is VerticalSlash(). Errors: ValueError naming what was got."""
    if pattern is None:
        return VerticalSlash()
    if isinstance(pattern, (Dense, VerticalSlash, XAttention, Moba)):
        return pattern
    raise ValueError(
        f"pattern: expected mtraining.VerticalSlash(...), XAttention(...), Moba(...) or Dense(), got {pattern!r}"
    )


def _check_types(pattern) -> None:
    """Errors: ValueError naming a keyword whose value is of another type than its own."""
    for field in dataclasses.fields(pattern):
        value = getattr(pattern, field.name)
        if isinstance(value, bool) or not isinstance(value, _KINDS[field.type]):
            raise ValueError(f"{field.name}: expected {_SAID[field.type]}, got {value!r}")
