"""Token files from text that is already on this machine: the Python sources of installed packages, as bytes.

In:   package names, byte budgets, a seed. Out: <out>/train.{bin,idx}, <out>/valid.{bin,idx} and their facts.
Next: mtraining train reads them ([data] train, valid).

Every file is one document; no file is in both sets. Format: Megatron's .bin/.idx (see write_token_file).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

_SLICE = 2048
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


@dataclass
class Prepared:
    train: str  # prefix of the token files
    valid: str
    train_tokens: int
    valid_tokens: int
    unigram_entropy: float  # nats a byte, of the held-out text under its own byte frequencies
    package: str


def write_token_file(prefix: Path, documents: Iterable[np.ndarray], dtype: str = "uint8") -> int:
    """Writes <prefix>.bin and <prefix>.idx, one sequence a document; returns the number of tokens.

    dtype: one of uint8, int8, int16, int32, int64, uint16 (for vocabularies below 65500).
    Errors: ValueError where an id does not fit the dtype: ids are never wrapped.
    """
    if dtype not in _CODES:
        raise ValueError(f"dtype: expected one of {', '.join(_CODES)}, got {dtype}")
    limits = np.iinfo(dtype)
    lengths: list[int] = []
    prefix.parent.mkdir(parents=True, exist_ok=True)
    index = prefix.with_name(prefix.name + ".idx")
    index.unlink(missing_ok=True)  # never an old index beside new tokens
    with open(prefix.with_name(prefix.name + ".bin"), "wb") as out:
        for ids in documents:
            ids = np.asarray(ids)
            if ids.size and (ids.min() < 0 or ids.max() > limits.max):
                raise ValueError(
                    f"{prefix}: token ids {ids.min()} .. {ids.max()} do not fit {dtype}"
                )
            out.write(ids.astype(f"<{np.dtype(dtype).str[1:]}").tobytes())
            lengths.append(int(ids.size))
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * width if lengths else np.zeros(0)
    with open(index, "wb") as out:
        out.write(b"MMIDIDX\0\0")
        out.write(struct.pack("<QBQQ", 1, _CODES[dtype], len(lengths), len(lengths) + 1))
        out.write(np.asarray(lengths, dtype="<i4").tobytes())
        out.write(pointers.astype("<i8").tobytes())
        out.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return sum(lengths)


def python_sources(package: str) -> list[Path]:
    """All .py files of an installed package, sorted. The package is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not installed here")
    root = Path(spec.submodule_search_locations[0])
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise ValueError(f"package {package} has no Python sources in {root}")
    return files


def unigram_entropy(data: np.ndarray) -> float:
    """Entropy of a byte array's own frequencies, in nats a byte."""
    counts = np.bincount(data, minlength=256).astype(float)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def prepare_bytes(
    out: Path,
    package: str = "torch",
    train_bytes: int = 8 << 20,
    valid_bytes: int = (16 << 10) + 1,
    seed: int = 1,
) -> Prepared:
    """Cuts held-out and training text out of the package's sources, in a seeded order of files.

    Training takes whole files. Of each held-out file only a slice of at most _SLICE bytes is taken, so that few bytes come
    from many files.
    """
    files = python_sources(package)
    random.Random(seed).shuffle(files)
    sets: dict[str, list[np.ndarray]] = {"valid": [], "train": []}
    budget = {"valid": valid_bytes, "train": train_bytes}
    waiting = iter(files)
    for name in ("valid", "train"):
        room = budget[name]
        while room > 0:
            path = next(waiting, None)
            if path is None:
                break
            text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
            if name == "valid":
                begin = max(0, text.size - _SLICE) // 2
                text = text[begin : begin + _SLICE]
            text = text[:room]
            if text.size:
                sets[name].append(text)
                room -= text.size
        if not sets[name]:
            raise ValueError(f"package {package} has too little text for a {name} set")
    counts = {name: write_token_file(out / name, documents) for name, documents in sets.items()}
    return Prepared(
        train=str(out / "train"),
        valid=str(out / "valid"),
        train_tokens=counts["train"],
        valid_tokens=counts["valid"],
        unigram_entropy=unigram_entropy(np.concatenate(sets["valid"])),
        package=package,
    )


def _positive(name: str):
    """A parser of whole numbers above 0 for argparse, which names the option itself."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if value <= 0:
            raise argparse.ArgumentTypeError(f"expected a number of {name} above 0, got {text!r}")
        return value

    return parse


class _Parser(argparse.ArgumentParser):
    """Its mistakes are one sentence as well."""

    def error(self, message: str):
        self.exit(2, f"mtraining: error: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser(
        prog="python -m mtraining.prepare",
        description="Writes token files for mtraining train from the Python sources of an installed package, a byte a token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    show = {"default": argparse.SUPPRESS}
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for train.bin, train.idx, valid.bin, valid.idx; made if missing",
        **show,
    )
    parser.add_argument("--package", default="torch", help="whose sources to read; not imported")
    parser.add_argument(
        "--train-bytes", type=_positive("bytes"), default=8 << 20, help="at most, for training"
    )
    parser.add_argument(
        "--valid-bytes", type=_positive("bytes"), default=(16 << 10) + 1, help="at most, held out"
    )
    parser.add_argument("--seed", type=int, default=1, help="order in which files are taken")
    a = parser.parse_args(arguments)
    try:
        prepared = prepare_bytes(a.out, a.package, a.train_bytes, a.valid_bytes, a.seed)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"mtraining: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    assert math.isfinite(prepared.unigram_entropy)
    print(json.dumps(asdict(prepared), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
