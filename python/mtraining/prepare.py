"""Token files from data that is already on this machine: the Python sources of installed packages, as bytes, or an MDS folder.

In:   package names, byte budgets, a seed; or an MDS folder of token ids. Out: <out>/train.{bin,idx}, <out>/valid.{bin,idx}
      and their facts.
Next: mtraining train reads them ([data] train, valid).

Every file is one document; no file is in both sets, nor is a sample of an MDS folder. Format: Megatron's .bin/.idx (see write_token_file).
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mtraining import mds
from mtraining.command_line import Defaults, Parser, positive, reported

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


@dataclass
class PreparedMds:
    train: str  # prefix of the token files
    valid: str
    train_tokens: int
    valid_tokens: int
    dropped_tokens: int  # in no document; read = train + valid + dropped
    read_tokens: int
    samples: int
    documents: int
    dtype: str  # of the token files
    verified: list[str]  # kinds of hashes that every shard was compared by
    unverified: list[str]  # other kinds of hashes that the index carries


def write_token_file(prefix: Path, documents: Iterable[np.ndarray], dtype: str = "uint8") -> int:
    """Writes <prefix>.bin and <prefix>.idx, one sequence a document; returns the number of tokens.

    dtype: one of uint8, int8, int16, int32, int64, uint16 (for vocabularies below 65500).
    Errors: ValueError where an id does not fit the dtype: ids are never wrapped. Whatever fails leaves the files that were there.
    """
    if dtype not in _CODES:
        raise ValueError(f"dtype: expected one of {', '.join(_CODES)}, got {dtype}")
    limits = np.iinfo(dtype)
    lengths: list[int] = []
    prefix.parent.mkdir(parents=True, exist_ok=True)
    names = {end: prefix.with_name(prefix.name + end) for end in (".bin", ".idx")}
    parts = {end: path.with_name(path.name + ".part") for end, path in names.items()}
    try:
        with open(parts[".bin"], "wb") as out:
            for ids in documents:
                ids = np.asarray(ids)
                if ids.size and (ids.min() < 0 or ids.max() > limits.max):
                    raise ValueError(
                        f"{prefix}: token ids {ids.min()} .. {ids.max()} do not fit {dtype}"
                    )
                out.write(ids.astype(f"<{np.dtype(dtype).str[1:]}").tobytes())
                lengths.append(int(ids.size))
        width = np.dtype(dtype).itemsize
        ends = np.cumsum(lengths, dtype=np.int64) * width
        with open(parts[".idx"], "wb") as out:
            out.write(b"MMIDIDX\0\0")
            out.write(struct.pack("<QBQQ", 1, _CODES[dtype], len(lengths), len(lengths) + 1))
            out.write(np.asarray(lengths, dtype="<i4").tobytes())
            out.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes() if lengths else b"")
            out.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        names[".idx"].unlink(missing_ok=True)  # never an old index beside new tokens
        for end, part in parts.items():
            part.replace(names[end])
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return sum(lengths)


def python_sources(package: str) -> list[Path]:
    """All .py files of an installed package, sorted. The package is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of a package within one that is not there
        spec = None
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


def prepare_mds(
    out: Path,
    folder: Path,
    vocabulary: int,
    valid_samples: int = 1,
    tokens_column: str = "input_ids",
    bounds_column: str = "indices",
    drop_gaps: bool = False,
    verify: bool = False,
) -> PreparedMds:
    """Writes an MDS folder's documents, in its order: the first valid_samples samples are held out, the others train.

    bounds_column: the [begin, end) of each document in its sample; "none": a sample is one document.
    drop_gaps: tokens outside of all documents are dropped and counted; otherwise they are an error.
    One sample is in memory at a time, of a shard that is mapped.
    Errors: ValueError of one sentence: file, sample, expected, got.
    """
    shards = mds.read_index(folder)
    samples = sum(shard.samples for shard in shards)
    if samples <= valid_samples:
        raise ValueError(
            f"{folder}: expected more samples than the {valid_samples} held out, got {samples}"
        )
    dtypes = {_token_dtype(shard, tokens_column, bounds_column, vocabulary) for shard in shards}
    if len(dtypes) > 1:
        raise ValueError(f"{folder}: expected one type of ids in all shards, got {sorted(dtypes)}")
    verified = [set(shard.verify()) for shard in shards] if verify else [set()]
    kinds = set().union(*(shard.hashes for shard in shards))
    counts = {"read": 0, "dropped": 0, "documents": 0}

    def sample_documents(where: str, sample: dict) -> list[np.ndarray]:
        ids = sample[tokens_column]
        if ids.ndim != 1 or ids.dtype.kind not in "ui":
            raise ValueError(
                f"{where}: expected {tokens_column} as a row of whole numbers, got {ids.dtype.name}{list(ids.shape)}"
            )
        if np.iinfo(ids.dtype).max < vocabulary - 1:
            raise ValueError(
                f"{where}: expected a type of ids that holds a vocabulary of {vocabulary}, got {ids.dtype.name}"
            )
        wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if wrong.size:
            raise ValueError(
                f"{where}, token {wrong[0]}: expected an id below the vocabulary, {vocabulary}, got {ids[wrong[0]]}"
            )
        if bounds_column == "none":
            bounds = np.array([[0, ids.size]])
        else:
            bounds = sample[bounds_column]
        documents, dropped = mds.split(ids, bounds, where, drop_gaps)
        counts["read"] += ids.size
        counts["dropped"] += dropped
        counts["documents"] += len(documents)
        return documents

    def documents(read: Iterable[tuple[str, dict]]) -> Iterator[np.ndarray]:
        return itertools.chain.from_iterable(itertools.starmap(sample_documents, read))

    dtype = dtypes.pop()
    stream = itertools.chain.from_iterable(shard.read() for shard in shards)
    held_out = documents(itertools.islice(stream, valid_samples))
    valid = write_token_file(out / "valid", held_out, dtype)
    train = write_token_file(out / "train", documents(stream), dtype)
    if train + valid + counts["dropped"] != counts["read"]:
        raise AssertionError(f"{counts} and {train} + {valid} written")
    common = set.intersection(*verified)
    return PreparedMds(
        train=str(out / "train"),
        valid=str(out / "valid"),
        train_tokens=train,
        valid_tokens=valid,
        dropped_tokens=counts["dropped"],
        read_tokens=counts["read"],
        samples=samples,
        documents=counts["documents"],
        dtype=dtype,
        verified=sorted(common),
        unverified=sorted(kinds - common),
    )


def _token_dtype(shard: mds.Shard, tokens: str, bounds: str, vocabulary: int) -> str:
    """The token files' type for a shard's ids. A column that cannot hold the vocabulary holds ids that were wrapped."""
    columns = {column.name: column for column in shard.columns}
    for name in (tokens, bounds) if bounds != "none" else (tokens,):
        if name not in columns or not columns[name].encoding.startswith("ndarray"):
            raise ValueError(
                f"{shard.path}: expected an ndarray column {name}, got {mds.described(shard.columns)}"
            )
    dtype = columns[tokens].dtype
    if dtype is None:
        return "int32"
    if dtype.kind not in "ui" or np.iinfo(dtype).max < vocabulary - 1:
        raise ValueError(
            f"{shard.path}: column {tokens}: expected whole numbers that hold a vocabulary of {vocabulary}, got {dtype.name}"
        )
    return dtype.name if dtype.name in ("uint8", "uint16") else "int32"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m mtraining.prepare",
        description="Writes token files for mtraining train from the Python sources of an installed package, a byte a token, or from an "
        "MDS folder of token ids, its documents kept.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for train.bin, train.idx, valid.bin, valid.idx; made if missing",
    )
    parser.add_argument("--package", default="torch", help="whose sources to read; not imported")
    parser.add_argument(
        "--train-bytes", type=positive("bytes"), default=8 << 20, help="at most, for training"
    )
    parser.add_argument(
        "--valid-bytes", type=positive("bytes"), default=(16 << 10) + 1, help="at most, held out"
    )
    parser.add_argument("--seed", type=int, default=1, help="order in which files are taken")
    parser.add_argument(
        "--mds",
        type=Path,
        help="folder with index.json and raw .mds shards, read instead of a package",
    )
    parser.add_argument(
        "--vocabulary",
        type=positive("ids"),
        help="ids of an MDS folder are below it; needed with --mds",
    )
    parser.add_argument(
        "--valid-samples",
        type=positive("samples"),
        default=1,
        help="first samples of an MDS folder that are held out",
    )
    parser.add_argument("--tokens-column", default="input_ids", help="column of token ids")
    parser.add_argument(
        "--bounds-column",
        default="indices",
        help="column of document bounds in a sample, [n, 2]; none: a sample is one document",
    )
    parser.add_argument(
        "--drop-gaps",
        action="store_true",
        help="drop tokens outside of all documents and report how many; otherwise they are refused",
    )
    parser.add_argument(
        "--verify", action="store_true", help="compare MDS shards with the index's hashes"
    )
    a = parser.parse_args(arguments)
    from_package = ("package", "train_bytes", "valid_bytes", "seed")
    from_mds = (
        "vocabulary",
        "valid_samples",
        "tokens_column",
        "bounds_column",
        "drop_gaps",
        "verify",
    )
    for name in from_package if a.mds else from_mds:
        if getattr(a, name) != parser.get_default(name):
            parser.error(
                f"--{name.replace('_', '-')} has no meaning {'with' if a.mds else 'without'} --mds"
            )
    if a.mds and not 0 < (a.vocabulary or 0) <= 1 << 31:
        parser.error(f"--vocabulary: expected 1 .. 2147483648 with --mds, got {a.vocabulary}")

    def work() -> None:
        if a.mds:
            mds_options = {name: getattr(a, name) for name in from_mds}
            prepared = prepare_mds(a.out, a.mds, **mds_options)
        else:
            prepared = prepare_bytes(a.out, a.package, a.train_bytes, a.valid_bytes, a.seed)
            assert math.isfinite(prepared.unigram_entropy)
        print(json.dumps(asdict(prepared), indent=2))

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())
