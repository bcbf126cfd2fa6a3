"""MDS folders are read as they are written; each fault is one sentence that names the file.

The folders are written here, byte by byte, by what the format says.
"""

import hashlib
import json
import re
import struct

import numpy as np
import pytest
from mtraining.mds import Column, read_index
from mtraining.prepare import main, prepare_mds

VOCABULARY = 151936
COLUMNS = {
    "domain": "str",
    "indices": "ndarray:uint32",
    "input_ids": "ndarray:uint32",
    "length": "int",
}
CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32}
CODES |= {"int32": 33, "float32": 34, "uint64": 64, "int64": 65, "float64": 66}


def encode(encoding, value):
    if encoding == "str":
        return value.encode()
    if encoding == "bytes":
        return value
    if encoding == "int":
        return struct.pack("<q", value)
    if not encoding.startswith("ndarray"):
        return np.dtype(encoding).type(value).tobytes()
    parts = encoding.split(":")
    head = b"" if len(parts) > 1 else bytes([CODES[value.dtype.name]])
    if len(parts) < 3:
        widest = max(value.shape)
        power = sum(widest >= 1 << bits for bits in (8, 16, 32))
        head += bytes([value.ndim << 2 | power])
        head += b"".join(struct.pack("<" + "BHIQ"[power], side) for side in value.shape)
    return head + value.tobytes()


def fixed_size(encoding):
    if encoding == "int":
        return 8
    if encoding.count(":") == 2:
        _, dtype, shape = encoding.split(":")
        return int(np.prod([int(side) for side in shape.split(",")])) * np.dtype(dtype).itemsize
    if encoding.startswith("ndarray") or encoding in ("str", "bytes", "pkl", "json"):
        return None
    return np.dtype(encoding).itemsize


def write_folder(folder, shards, columns=None, hashes=("sha1",)):
    """shards: lists of samples. Returns the index, which is written as well."""
    columns = columns or COLUMNS
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    configuration = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": list(hashes),
        "size_limit": 1 << 26,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [fixed_size(columns[name]) for name in names],
    }
    text = json.dumps(configuration, sort_keys=True).encode()
    entries = []
    for number, samples in enumerate(shards):
        bodies = []
        for sample in samples:
            data = [encode(columns[name], sample[name]) for name in names]
            sizes = [len(d) for d, n in zip(data, names, strict=True) if not fixed_size(columns[n])]
            bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data))
        begin = 4 + 4 * (len(bodies) + 1) + len(text)
        offsets = [begin + sum(map(len, bodies[:i])) for i in range(len(bodies) + 1)]
        raw = struct.pack(f"<I{len(offsets)}I", len(bodies), *offsets) + text + b"".join(bodies)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(raw)
        digests = {h: hashlib.new(h, raw).hexdigest() if h == "sha1" else "00" for h in hashes}
        raw_data = {"basename": name, "bytes": len(raw), "hashes": digests}
        entries.append(
            {**configuration, "samples": len(samples), "raw_data": raw_data, "zip_data": None}
        )
    index = json.loads(json.dumps({"version": 2, "shards": entries}))  # entries of their own
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / "index.json").write_text(json.dumps(index))


def packed(ids, *ends):
    """A sample of documents that end there."""
    begins = [0, *ends[:-1]]
    return {
        "input_ids": np.asarray(ids, dtype=np.uint32),
        "indices": np.stack([begins, ends], axis=1).astype(np.uint32),
        "length": len(ids),
        "domain": "bücher",
    }


def some_shards(seed=1):
    rng = np.random.default_rng(seed)
    shards = []
    for count in (3, 1, 4):
        samples = []
        for _ in range(count):
            ids = rng.integers(0, VOCABULARY, int(rng.integers(20, 400)))
            cuts = sorted(set(rng.integers(1, len(ids), 3).tolist()) | {len(ids)})
            samples.append(packed(ids, *cuts))
        shards.append(samples)
    shards[0][0]["input_ids"][:2] = 151643, 128000  # ids that 16 bits would wrap
    return shards


def read_token_file(prefix, dtype="<i4"):
    ids = np.fromfile(f"{prefix}.bin", dtype)
    index = open(f"{prefix}.idx", "rb").read()
    sequences, documents = struct.unpack_from("<QQ", index, 18)
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    firsts = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
    assert firsts.tolist() == list(range(sequences + 1))
    return np.split(ids, np.cumsum(lengths)[:-1])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "set"


def refused(tmp_path, folder, *words, **options):
    """The folder is refused by one sentence that has all the words."""
    with pytest.raises(ValueError) as caught:
        prepare_mds(tmp_path / "out", folder, **{"vocabulary": VOCABULARY, **options})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_every_encoding_comes_back(folder):
    rng = np.random.default_rng(2)
    columns = {"raw": "bytes", "text": "str", "whole": "int", "fixed": "ndarray:int16:2,3"}
    columns |= {name: name for name in CODES} | {f"nd_{name}": f"ndarray:{name}" for name in CODES}
    columns |= {f"any_{name}": "ndarray" for name in CODES}
    samples = []
    for shape in ((1,), (255,), (256, 2), (3, 1, 70), (65536,)):
        sample = {"raw": b"\0\xff", "text": "ä", "whole": -(2**60)}
        sample["fixed"] = rng.integers(-9, 9, (2, 3)).astype(np.int16)
        for name in CODES:
            sample[name] = np.dtype(name).type(7)
            sample[f"nd_{name}"] = rng.integers(0, 99, shape).astype(name)
            sample[f"any_{name}"] = rng.integers(0, 99, shape).astype(name)
        samples.append(sample)
    write_folder(folder, [samples[:2], samples[2:]], columns)
    read = [values for shard in read_index(folder) for _, values in shard.read()]
    assert len(read) == len(samples)
    for got, expected in zip(read, samples, strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, np.ndarray):
                assert got[name].dtype == value.dtype
            np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize(
    ("encoding", "data", "words"),
    [
        ("ndarray:uint32", b"\x04\0", "expected sides above 0, got [0]"),
        ("ndarray:uint32", b"\x04\2\0\0\0\0\0\0", "expected 8 bytes for uint32[2], got 6"),
        ("ndarray:uint32", b"\x05\2", "the shape is cut after 2 bytes"),
        ("ndarray", b"\x20", "expected type and shape, got 1 bytes"),
        ("ndarray", b"\x07\x04\1", "expected the code of a type, got 7"),
        ("int", b"1234", "expected 8 bytes, got 4"),
        ("str", b"\xff", "expected UTF-8"),
    ],
)
def test_values_that_are_none(encoding, data, words):
    with pytest.raises(ValueError, match="shard, sample 3, column c: ") as caught:
        Column("c", encoding, None).decode(data, "shard, sample 3")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("valid_samples", [1, 3, 4, 7])
def test_documents_and_order_are_kept(tmp_path, folder, valid_samples):
    shards = some_shards()
    write_folder(folder, shards)
    facts = prepare_mds(tmp_path / "out", folder, VOCABULARY, valid_samples, verify=True)
    samples = [sample for shard in shards for sample in shard]
    for name, part in (("valid", samples[:valid_samples]), ("train", samples[valid_samples:])):
        expected = [s["input_ids"][b:e] for s in part for b, e in s["indices"]]
        got = read_token_file(tmp_path / "out" / name)
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    total = sum(len(s["input_ids"]) for s in samples)
    assert facts.read_tokens == facts.train_tokens + facts.valid_tokens == total
    assert (facts.dropped_tokens, facts.samples, facts.dtype) == (0, 8, "int32")
    assert facts.documents == sum(len(s["indices"]) for s in samples)
    assert (facts.verified, facts.unverified) == (["sha1"], [])


def test_bounds_can_be_ignored_only_by_name(tmp_path, folder):
    shards = some_shards()
    write_folder(folder, shards)
    prepare_mds(tmp_path / "out", folder, VOCABULARY, bounds_column="none")
    got = read_token_file(tmp_path / "out" / "train")
    assert [len(d) for d in got] == [len(s["input_ids"]) for shard in shards for s in shard][1:]
    refused(tmp_path, folder, "shard.00000.mds", "column bounds", bounds_column="bounds")
    refused(tmp_path, folder, "column ids", "input_ids ndarray:uint32", tokens_column="ids")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("named", [True, False])
def test_the_type_follows_the_encoding(tmp_path, folder, dtype, named):
    vocabulary = 256 if dtype == "uint8" else 65000 if dtype == "uint16" else VOCABULARY
    ids = np.array([0, 5, vocabulary - 1], dtype=dtype)
    sample = {"input_ids": ids, "indices": np.array([[0, 3]])}
    encoding = f"ndarray:{dtype}" if named else "ndarray"
    write_folder(folder, [[sample, sample]], {"input_ids": encoding, "indices": "ndarray:int64"})
    facts = prepare_mds(tmp_path / "out", folder, vocabulary)
    assert facts.dtype == (dtype if named and dtype in ("uint8", "uint16") else "int32")
    got = read_token_file(tmp_path / "out" / "train", np.dtype(facts.dtype).newbyteorder("<"))
    assert got[0].tolist() == [0, 5, vocabulary - 1]
    if dtype in ("uint8", "uint16"):  # the ids were wrapped before they came here
        refused(tmp_path, folder, "shard.00000.mds", "vocabulary of 151936", dtype)
        if named:  # told before anything is written
            empty = tmp_path / "empty"
            refused(empty, folder, "shard.00000.mds: column input_ids")
            assert not empty.exists()


def test_ids_outside_of_the_vocabulary(tmp_path, folder):
    shards = some_shards()
    shards[2][3]["input_ids"][7] = VOCABULARY
    write_folder(folder, shards)
    refused(tmp_path, folder, "shard.00002.mds, sample 3, token 7", "151936, got 151936")
    columns = {"input_ids": "ndarray:int32", "indices": "ndarray:int32"}
    sample = {"input_ids": np.array([-1], np.int32), "indices": np.array([[0, 1]], np.int32)}
    write_folder(folder, [[sample, sample]], columns)
    refused(tmp_path, folder, "sample 0, token 0", "got -1")


@pytest.mark.parametrize(
    ("bounds", "word"),
    [
        ([[0, 4], [4, 9]], "up to token 10, got 9"),
        ([[0, 4], [5, 10]], "document 1: expected bounds from 4"),
        ([[1, 10]], "document 0: expected bounds from 0"),
        ([[0, 6], [5, 10]], "document 1: expected bounds from 6"),
        ([[0, 4], [4, 11]], "got 4 .. 11"),
        ([[0, 10], [10, 9]], "got 10 .. 9"),
        ([[5, 10], [0, 5]], "document 0: expected bounds from 0"),
        ([[0, 5, 10]], "[n, 2], got uint32[1, 3]"),
    ],
)
def test_bounds_that_are_none(tmp_path, folder, bounds, word):
    wrong = packed(np.arange(10), 10)
    wrong["indices"] = np.array(bounds, dtype=np.uint32)
    write_folder(folder, [[packed(np.arange(3), 3)], [packed(np.arange(3), 3), wrong]])
    refused(tmp_path, folder, "shard.00001.mds, sample 1", word)
    if word.startswith(("up to", "document 1: expected bounds from 4", "document 0")):
        if bounds[0][0] == 5:
            return  # out of order, in either case
        facts = prepare_mds(tmp_path / "out", folder, VOCABULARY, drop_gaps=True)
        assert facts.dropped_tokens == 1
        assert facts.read_tokens == facts.train_tokens + facts.valid_tokens + 1 == 16
    else:
        refused(tmp_path, folder, "shard.00001.mds, sample 1", word, drop_gaps=True)


def test_shards_that_the_index_does_not_describe(tmp_path, folder):
    index = write_folder(folder, some_shards())
    path = folder / "shard.00002.mds"
    whole = path.read_bytes()

    def put(at, value):
        path.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])

    offsets = struct.unpack_from("<5I", whole, 4)
    put(0, 3)
    refused(tmp_path, folder, "shard.00002.mds", "expected 4 samples", "got 3")
    put(8, offsets[2] + 1)
    refused(tmp_path, folder, "shard.00002.mds, offset 2", f"got {offsets[2]}")
    put(12, len(whole) + 1)
    refused(tmp_path, folder, "shard.00002.mds, offset 2", f"got {len(whole) + 1}")
    put(20, len(whole) - 1)
    refused(tmp_path, folder, "shard.00002.mds", f"end at {len(whole)}, got {len(whole) - 1}")
    put(4, 8)
    refused(tmp_path, folder, "shard.00002.mds, offset 0", "got 8")
    put(4, offsets[0] - 1)
    refused(tmp_path, folder, "shard.00002.mds", "no JSON")
    put(offsets[1], 10**6)
    refused(tmp_path, folder, "shard.00002.mds, sample 1", "by its columns' sizes")
    path.write_bytes(whole.replace(b'["str"', b'["pkl"', 1))
    refused(tmp_path, folder, "shard.00002.mds", "column domain is pickled")
    path.write_bytes(whole.replace(b'"length"]', b'"lengts"]', 1))
    refused(tmp_path, folder, "shard.00002.mds", "length int", "lengts int")
    for cut in (0, 3, 7, 8, 30, len(whole) - 1):
        path.write_bytes(whole[:cut])
        expected = f"expected {len(whole)} bytes" if cut >= 8 else "8 bytes"
        refused(tmp_path, folder, "shard.00002.mds", expected, f"got {cut}")
    path.unlink()
    refused(tmp_path, folder, "shard.00002.mds", "missing")
    path.write_bytes(whole)
    index["shards"][2]["samples"] = 100
    write_index(folder, index)
    refused(tmp_path, folder, "shard.00002.mds", "expected 100 samples", "got 4")


def test_any_cut_or_flipped_byte_is_an_error_of_its_own_or_harmless(tmp_path, folder):
    index = write_folder(folder, [[packed(np.arange(9), 4, 9)], [packed(np.arange(5), 5)] * 2])
    path = folder / "shard.00001.mds"
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            prepare_mds(tmp_path / "out", folder, VOCABULARY)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        refused(tmp_path, folder, str(path), "corrupt: expected sha1", verify=True)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        index["shards"][1]["raw_data"]["bytes"] = cut
        write_index(folder, index)
        refused(tmp_path, folder, str(path))


def test_compressed_shards(tmp_path, folder):
    index = write_folder(folder, some_shards())
    packed_path = folder / "shard.00001.mds.zstd"
    packed_path.write_bytes(b"\x28\xb5\x2f\xfd")
    for entry in index["shards"]:
        name = entry["raw_data"]["basename"] + ".zstd"
        entry.update(compression="zstd:3", zip_data={"basename": name, "bytes": 4, "hashes": {}})
    write_index(folder, index)
    prepare_mds(tmp_path / "out", folder, VOCABULARY)  # the raw files are there
    (folder / "shard.00001.mds").unlink()
    command = f"zstd -d -k {packed_path} -o {folder / 'shard.00001.mds'}"
    refused(tmp_path, folder, "shard.00001.mds", "compressed shards are not supported", command)


def test_hashes(tmp_path, folder):
    write_folder(folder, some_shards(), hashes=("sha1", "xxh64"))
    facts = prepare_mds(tmp_path / "out", folder, VOCABULARY, verify=True)
    assert (facts.verified, facts.unverified) == (["sha1"], ["xxh64"])
    facts = prepare_mds(tmp_path / "out", folder, VOCABULARY)
    assert (facts.verified, facts.unverified) == ([], ["sha1", "xxh64"])
    write_folder(folder, some_shards(), hashes=("xxh64",))
    refused(tmp_path, folder, "shard.00000.mds", "nothing to verify", "got xxh64", verify=True)
    write_folder(folder, some_shards(), hashes=())
    refused(tmp_path, folder, "shard.00000.mds", "nothing to verify", "got none", verify=True)


@pytest.mark.parametrize(
    "encoding", ["pkl", "json", "jpeg", "ndarray:object", "ndarray:uint32:0", "ndarray:uint32:x"]
)
def test_columns_of_other_kinds(tmp_path, folder, encoding):
    index = write_folder(folder, some_shards())
    index["shards"][1]["column_encodings"][0] = encoding
    write_index(folder, index)
    refused(tmp_path, folder, "index.json, shard 1", "column domain", encoding)


def test_indexes_that_are_none(tmp_path, folder):
    refused(tmp_path, folder, "index.json: missing")
    folder.mkdir()
    for text, words in (
        ("{", "expected JSON"),
        ("[]", "expected version 2, got list"),
        ('{"version": 1, "shards": []}', "got 1"),
        ('{"version": 2, "shards": []}', "at least one shard"),
        ('{"version": 2, "shards": [{"version": 2, "format": "json"}]}', "format mds"),
        ('{"version": 2, "shards": [{"version": 2, "format": "mds"}]}', "raw_data"),
        ('{"version": 2, "shards": [7]}', "shard 0"),
    ):
        (folder / "index.json").write_text(text)
        refused(tmp_path, folder, "index.json", words)
    for key, value in (("basename", "../x"), ("basename", "/x"), ("bytes", "many"), ("bytes", -1)):
        index = write_folder(folder, some_shards())
        index["shards"][1]["raw_data"][key] = value
        write_index(folder, index)
        refused(tmp_path, folder, "index.json, shard 1", str(value))
    for samples in ("many", -1, None):
        index = write_folder(folder, some_shards())
        index["shards"][1]["samples"] = samples
        write_index(folder, index)
        refused(tmp_path, folder, "index.json, shard 1", "samples: expected a whole number")
    index = write_folder(folder, some_shards())
    index["shards"][1]["column_names"][1] = "domain"
    write_index(folder, index)
    refused(tmp_path, folder, "index.json, shard 1", "each column once", "domain, domain")
    write_folder(folder, some_shards())
    refused(tmp_path, folder, "more samples than the 8 held out, got 8", valid_samples=8)


def test_command_line(tmp_path, folder, capsys):
    write_folder(folder, some_shards())
    arguments = ["--out", str(tmp_path / "out"), "--mds", str(folder)]
    assert main([*arguments, "--vocabulary", "151936", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verified"] == ["sha1"] and facts["samples"] == 8
    assert main([*arguments, "--vocabulary", "9"]) == 2
    assert re.fullmatch(r"mtraining: error: .*shard.00000.*got \d+\n", capsys.readouterr().err)
    for extra, words in (
        ([*arguments], "--vocabulary: expected"),
        ([*arguments, "--vocabulary", "9", "--train-bytes", "5"], "--train-bytes has no meaning"),
        (["--out", "x", "--verify"], "--verify has no meaning without --mds"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(extra)
        assert ended.value.code == 2 and words in capsys.readouterr().err
