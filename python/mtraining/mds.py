"""MDS folders, the on-disk form of MosaicML streaming, read with numpy alone.

In:   a folder with index.json (version 2) and its raw shards. Out: samples in the index's order, as dicts; their documents.
Next: mtraining.prepare writes them as token files.

A shard is: u32 number of samples n; n + 1 u32 offsets from the file's beginning; its configuration as JSON; the samples.
A sample is: a u32 size for each column of no fixed size, then the columns' bytes. Little endian throughout.
Every error is a ValueError of one sentence that names the file, and the sample where there is one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# The codes by which a plain `ndarray` column names its type.
_NDARRAY_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"}
_NDARRAY_CODES |= {33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
_SCALARS = {"int": "int64", **{name: name for name in _NDARRAY_CODES.values()}}
_CHUNK = 1 << 24
_UNPACK = {"zstd": "zstd -d -k {0} -o {1}", "gz": "gzip -d -k {0}", "bz2": "bzip2 -d -k {0}"}


@dataclass(frozen=True)
class Column:
    name: str
    encoding: str
    size: int | None  # bytes in every sample, None where each sample says it

    @property
    def dtype(self) -> np.dtype | None:
        """The type that an ndarray column fixes; None where each sample says it."""
        name = self.encoding.partition(":")[2].partition(":")[0]
        return np.dtype(name).newbyteorder("<") if name else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        text = self.encoding.partition(":")[2].partition(":")[2]
        return tuple(map(int, text.split(","))) if text else None

    def check(self, where: str) -> None:
        kind, _, rest = self.encoding.partition(":")
        if kind == "pkl":
            raise ValueError(f"{where}: column {self.name} is pickled (pkl), which is never read")
        if kind == "ndarray":
            dtype, _, shape = rest.partition(":")
            sides = shape.split(",") if shape else []
            known = not dtype or dtype in _NDARRAY_CODES.values()
            known = known and all(s.strip().isdecimal() and int(s) > 0 for s in sides)
        else:
            known = not rest and (kind in _SCALARS or kind in ("str", "bytes"))
        if not known:
            raise ValueError(
                f"{where}: column {self.name}: expected encoding ndarray, ndarray:<type>, a number, str or bytes, "
                f"got {self.encoding}"
            )

    def decode(self, data: bytes, where: str):
        """The column's value: an array, a number, a str or bytes."""
        where = f"{where}, column {self.name}"
        if self.encoding == "bytes":
            return data
        if self.encoding == "str":
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: expected UTF-8, got {error}") from error
        if self.encoding in _SCALARS:
            dtype = np.dtype(_SCALARS[self.encoding]).newbyteorder("<")
            if len(data) != dtype.itemsize:
                raise ValueError(f"{where}: expected {dtype.itemsize} bytes, got {len(data)}")
            return np.frombuffer(data, dtype)[0].item()
        return self._array(data, where)

    def _array(self, data: bytes, where: str) -> np.ndarray:
        at, dtype, shape = 0, self.dtype, self.shape
        try:
            if dtype is None:
                if data[0] not in _NDARRAY_CODES:
                    raise ValueError(f"{where}: expected the code of a type, got {data[0]}")
                dtype = np.dtype(_NDARRAY_CODES[data[0]]).newbyteorder("<")
                at = 1
            if shape is None:
                sides, width = data[at] >> 2, 1 << (data[at] & 3)
                shape = tuple(np.frombuffer(data, f"<u{width}", sides, at + 1).tolist())
                at += 1 + sides * width
        except IndexError:
            raise ValueError(f"{where}: expected type and shape, got {len(data)} bytes") from None
        except ValueError as error:
            if str(error).startswith(where):
                raise
            raise ValueError(f"{where}: the shape is cut after {len(data)} bytes") from error
        if 0 in shape:
            raise ValueError(f"{where}: expected sides above 0, got {list(shape)}")
        expected = math.prod(shape) * dtype.itemsize
        if len(data) - at != expected:
            raise ValueError(
                f"{where}: expected {expected} bytes for {dtype.name}{list(shape)}, got {len(data) - at}"
            )
        return np.frombuffer(data, dtype, offset=at).reshape(shape)


@dataclass(frozen=True)
class Shard:
    path: Path
    samples: int
    size: int
    hashes: dict[str, str]
    columns: tuple[Column, ...]
    packed: Path | None  # its compressed form

    def open(self) -> np.memmap:
        """The file's bytes. A cut file, or a compressed one alone, is refused."""
        if not self.path.is_file():
            if self.packed is not None and self.packed.is_file():
                suffix = self.packed.suffix[1:]
                how = _UNPACK.get(suffix, "decompress {0} as {1}").format(self.packed, self.path)
                raise ValueError(
                    f"{self.path}: expected the raw shard, got {self.packed.name} alone: compressed shards are not supported, "
                    f"decompress them first: {how}"
                )
            raise ValueError(f"{self.path}: the shard is missing")
        size = self.path.stat().st_size
        if size < 8:
            raise ValueError(f"{self.path}: expected a count and an offset, 8 bytes, got {size}")
        if size != self.size:
            raise ValueError(
                f"{self.path}: expected {self.size} bytes as index.json says, got {size}"
            )
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def verify(self) -> list[str]:
        """Compares the hashes that hashlib has; returns their kinds."""
        known = [kind for kind in sorted(self.hashes) if _has(kind)]
        if not known:
            kinds = ", ".join(sorted(self.hashes)) or "none"
            raise ValueError(
                f"{self.path}: nothing to verify it by: expected a hash that hashlib has, got {kinds}"
            )
        digests = [hashlib.new(kind) for kind in known]
        data = self.open()
        for begin in range(0, data.size, _CHUNK):
            for digest in digests:
                digest.update(data[begin : begin + _CHUNK])
        for kind, digest in zip(known, digests, strict=True):
            if digest.hexdigest() != self.hashes[kind]:
                raise ValueError(
                    f"{self.path}: the shard is corrupt: expected {kind} {self.hashes[kind]}, got {digest.hexdigest()}"
                )
        return known

    def read(self) -> Iterator[tuple[str, dict]]:
        """(where, values by column) for each sample, in order."""
        data = self.open()
        count = int(data[:4].view("<u4")[0])
        if count != self.samples:
            raise ValueError(
                f"{self.path}: expected {self.samples} samples as index.json says, got {count} in the shard"
            )
        head = 4 + 4 * (count + 1)
        if head > data.size:
            raise ValueError(
                f"{self.path}: {count} samples need {head} bytes of offsets, got {data.size} bytes"
            )
        offsets = np.array(data[4:head].view("<u4"), dtype=np.int64)
        for i, (begin, end) in enumerate(zip([head, *offsets[:-1]], offsets, strict=True)):
            if end < begin or end > data.size:
                raise ValueError(
                    f"{self.path}, offset {i}: expected {begin} .. {data.size}, got {end}"
                )
        if offsets[-1] != data.size:
            raise ValueError(
                f"{self.path}: expected the last sample to end at {data.size}, got {offsets[-1]}"
            )
        try:
            columns = _columns(json.loads(data[head : offsets[0]].tobytes()), str(self.path))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path}: the shard's configuration is no JSON") from error
        if columns != self.columns:
            raise ValueError(
                f"{self.path}: expected the columns of index.json, {described(self.columns)}, got {described(columns)}"
            )
        for i in range(count):
            where = f"{self.path}, sample {i}"
            yield where, self._sample(data[offsets[i] : offsets[i + 1]].tobytes(), where)

    def _sample(self, data: bytes, where: str) -> dict:
        head = 4 * sum(column.size is None for column in self.columns)
        if len(data) < head:
            raise ValueError(f"{where}: expected {head} bytes of sizes, got {len(data)}")
        given = iter(np.frombuffer(data[:head], "<u4").tolist())
        sizes = [next(given) if column.size is None else column.size for column in self.columns]
        if head + sum(sizes) != len(data):
            raise ValueError(
                f"{where}: expected {len(data)} bytes as its offsets say, got {head + sum(sizes)} by its columns' sizes"
            )
        ends = np.cumsum([head, *sizes]).tolist()
        return {
            column.name: column.decode(data[begin:end], where)
            for column, begin, end in zip(self.columns, ends[:-1], ends[1:], strict=True)
        }


def _has(kind: str) -> bool:
    return kind in hashlib.algorithms_available and not kind.startswith("shake_")


def described(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{column.name} {column.encoding}" for column in columns)


def _columns(configuration: dict, where: str) -> tuple[Column, ...]:
    keys = ("column_names", "column_encodings", "column_sizes")
    try:
        names, encodings, sizes = (list(configuration[key]) for key in keys)
        names = [str(name) for name in names]
        columns = tuple(
            Column(name, str(encoding), int(size) if size else None)
            for name, encoding, size in zip(names, encodings, sizes, strict=True)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: expected {', '.join(keys)} of one length, got {error}"
        ) from error
    if len(set(names)) != len(names):
        raise ValueError(f"{where}: expected each column once, got {', '.join(names)}")
    for column in columns:
        column.check(where)
    return columns


def read_index(folder: Path) -> list[Shard]:
    """The shards of folder/index.json, in its order; no shard is opened."""
    path = Path(folder) / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; expected the index of an MDS folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(index, dict) or index.get("version") != 2:
        got = index.get("version") if isinstance(index, dict) else type(index).__name__
        raise ValueError(f"{path}: expected version 2, got {got}")
    if not isinstance(index.get("shards"), list) or not index["shards"]:
        raise ValueError(f"{path}: expected a list of at least one shard, got none")
    shards = []
    for i, entry in enumerate(index["shards"]):
        where = f"{path}, shard {i}"
        try:
            form = (entry["version"], entry["format"])
            if form != (2, "mds"):
                raise ValueError(f"{where}: expected version 2, format mds, got {form}")
            raw, packed = entry["raw_data"], entry.get("zip_data")
            for key, number in (("samples", entry["samples"]), ("bytes", raw["bytes"])):
                if not isinstance(number, int) or number < 0:
                    raise ValueError(f"{where}: {key}: expected a whole number, got {number!r}")
            for name in [raw["basename"]] + ([packed["basename"]] if packed else []):
                if Path(name).is_absolute() or ".." in Path(name).parts:
                    raise ValueError(f"{where}: expected a file inside the folder, got {name}")
            shard = Shard(
                path=path.parent / raw["basename"],
                samples=entry["samples"],
                size=raw["bytes"],
                hashes=dict(raw.get("hashes") or {}),
                columns=_columns(entry, where),
                packed=path.parent / packed["basename"] if packed else None,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: expected version, format, samples and raw_data, got {error}"
            ) from error
        shards.append(shard)
    return shards


def split(
    ids: np.ndarray, bounds: np.ndarray, where: str, drop_gaps: bool = False
) -> tuple[list[np.ndarray], int]:
    """A sample's documents and the number of tokens in none of them.

    bounds: [n, 2], begin and end of each document. They must be in order and cover the sample without overlap; with drop_gaps
    tokens between them are dropped and counted.
    """
    if bounds.ndim != 2 or bounds.shape[1] != 2 or bounds.dtype.kind not in "ui":
        raise ValueError(
            f"{where}: expected document bounds as whole numbers [n, 2], got {bounds.dtype.name}{list(bounds.shape)}"
        )
    documents, at, dropped = [], 0, 0
    for i, (begin, end) in enumerate(bounds.tolist()):
        if begin < at or end < begin or end > ids.size or (begin > at and not drop_gaps):
            raise ValueError(
                f"{where}, document {i}: expected bounds from {at} on within {ids.size} tokens, got {begin} .. {end}"
            )
        dropped += begin - at
        if end > begin:
            documents.append(ids[begin:end])
        at = end
    if at < ids.size and not drop_gaps:
        raise ValueError(f"{where}: expected documents up to token {ids.size}, got {at}")
    return documents, dropped + ids.size - at
