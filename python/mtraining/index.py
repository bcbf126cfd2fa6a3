"""Index: what a pattern chose for each sample and query head, as tensors of fixed capacity with counts."""

import dataclasses

import torch

from mtraining.library import ops


def _check_int(name: str, given) -> None:
    """Errors: ValueError unless it is an int of 64 bits. A compiled function's may be a symbol."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise ValueError(f"{name}: expected an int, got {given!r}")
    if not -(2**63) <= given < 2**63:
        raise ValueError(f"{name}: expected an int of 64 bits, got {given}")


@dataclasses.dataclass(frozen=True)
class Index:
    """Block diagonals and columns of each sample and query head.

    Query i attends to key j iff document_starts[i] <= j <= i and (i // 64 - j // 64 is one of the head's diagonals or j is one of
    its columns). A pair reached both ways counts once. Nothing of the choice is differentiated.

    Shapes, int32: diagonals [B, H, capacity], num_diagonals [B, H], columns [B, H, capacity], num_columns [B, H]; ascending
    within a count, -1 beyond it. dense_heads bool [B, H]: heads that became dense. caps_hit int64 []: heads whose choice a cap
    cut. document_starts int32 [B, S] or None. softmax_scale: what the scores were scaled with; 0 means 1 / sqrt(D).

    Source: MTraining, arXiv 2510.18830, section 3; the form (diagonals and columns instead of dense masks) is ours.
    """

    seq_len: int
    diagonals: torch.Tensor
    num_diagonals: torch.Tensor
    columns: torch.Tensor
    num_columns: torch.Tensor
    dense_heads: torch.Tensor
    caps_hit: torch.Tensor
    document_starts: torch.Tensor | None = None
    softmax_scale: float = 0.0
    last_q: int = 64
    window: str = "last"

    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """diagonals, num_diagonals, columns, num_columns: what operators take. Errors: ValueError naming a field of another type."""
        for name in ("diagonals", "num_diagonals", "columns", "num_columns"):
            given = getattr(self, name)
            if not isinstance(given, torch.Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(given).__name__}")
        _check_int("seq_len", self.seq_len)
        if not isinstance(self.softmax_scale, (float, int)):
            raise ValueError(f"softmax_scale: expected a number, got {self.softmax_scale!r}")
        return self.diagonals, self.num_diagonals, self.columns, self.num_columns

    def mask(self) -> torch.Tensor:
        """bool [B, H, S, S], True where a pair is computed. For small S: it takes B H S^2 bytes."""
        return ops.index_mask(*self.lists(), self.document_starts, self.seq_len)

    def pairs(self) -> torch.Tensor:
        """int64 [B, H]: pairs that a kernel computes, in whole blocks: each chosen 64 x 64 block, and 64 rows of a column outside."""
        return ops.index_pairs(*self.lists(), self.seq_len)

    def density(self) -> float:
        """pairs() over all heads / (B H S^2 / 2): 1 is about the cost of dense causal attention (above 1 for short S, since
        blocks count whole)."""
        pairs = self.pairs()
        return float(pairs.sum()) / (pairs.numel() * self.seq_len**2 / 2)

    def recall(
        self, q: torch.Tensor, k: torch.Tensor, *, rows: int = 256, seed: int = 0
    ) -> torch.Tensor:
        """Share of the attention probability that the index covers, float64 [B, H], on `rows` rows sampled outside the window
        that the index was chosen from (the window itself where there are no others).

        Shapes: q [B, S, H, D], k [B, S, Hk, D], as the index was built from. Errors: ValueError.
        """
        return self._recall(q, k, rows, seed)[1]

    def window_recall(self, q: torch.Tensor, k: torch.Tensor) -> float:
        """The same on the window's own rows, mean over heads: at least p by construction, so no evidence."""
        return float(self._recall(q, k, 1, 0)[0].mean())

    def _recall(self, q, k, rows, seed):
        from mtraining.ops import check_tensors

        check_tensors(q=q, k=k)
        for name, given in (("rows", rows), ("seed", seed), ("last_q", self.last_q)):
            _check_int(name, given)
        if not isinstance(self.window, str):
            raise ValueError(f"window: expected a string, got {self.window!r}")
        return ops.recall(
            q.detach(),
            k.detach(),
            *self.lists(),
            self.document_starts,
            self.softmax_scale,
            self.last_q,
            self.window,
            rows,
            seed,
        )

    def plot(self, head: int = 0, sample: int = 0, path=None):
        """Draws one head's mask by blocks: how many of a block's pairs are computed, 0 .. 1. Needs matplotlib.

        Args: head, sample: which; path: a file to write (PNG, ..), or None. Returns: the matplotlib figure.
        Errors: ValueError where head or sample is out of range.
        """
        self.pairs()  # refuses lists that are none
        _check_int("head", head)
        _check_int("sample", sample)
        check_place(head, sample, *self.num_diagonals.shape)
        count = int(self.num_diagonals[sample, head]), int(self.num_columns[sample, head])
        title = f"head {head}: {count[0]} diagonals, {count[1]} columns"
        return draw(self._block_shares(head, sample), self.seq_len, title, path)

    def _block_shares(self, head: int, sample: int) -> torch.Tensor:
        """float32 [NB, NB] by query block and key block; never S x S."""
        blocks = (self.seq_len + 63) // 64
        columns = self.columns[sample, head, : self.num_columns[sample, head]].long().cpu()
        by_block = torch.bincount(columns // 64, minlength=blocks).float() / 64
        image = by_block.expand(blocks, blocks).tril().clone()
        distance = torch.arange(blocks)[:, None] - torch.arange(blocks)
        chosen = self.diagonals[sample, head, : self.num_diagonals[sample, head]].long().cpu()
        image[torch.isin(distance, chosen)] = 1.0
        return image


def check_place(head: int, sample: int, batch: int, heads: int) -> None:
    """Errors: ValueError where head or sample is out of range."""
    if not (0 <= head < heads and 0 <= sample < batch):
        raise ValueError(
            f"plot: expected head 0 .. {heads - 1} and sample 0 .. {batch - 1}, got {head} and {sample}"
        )


def draw(shares: torch.Tensor, seq_len: int, title: str, path):
    """The figure of shares [N, N] on the CPU, by query block and key block; written to path where that is not None."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    extent = (0, seq_len, seq_len, 0)
    axes.imshow(
        shares.numpy(), cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest"
    )
    axes.set_xlabel("key position")
    axes.set_ylabel("query position")
    axes.set_title(title)
    if path is not None:
        figure.savefig(path)
    return figure
