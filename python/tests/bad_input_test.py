"""Bad input, one table: each case is one sentence on standard error and the right exit code, soon, with nothing left behind.

Exit 2 for a mistake of the user, a malformed file that they named included; 1 for what fails outside: a disk, standard output.
"""

import fcntl
import json
import os
import resource
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from mtraining.prepare import write_token_file

from python.tests.conftest import Job, assert_one_sentence


@dataclass
class Case:
    """One bad input. `arguments` may hold {folder}, {out}, {config}, {data}; `prepare` makes the files that they name."""

    arguments: list[str]
    parts: list[str]
    prepare: object = None
    code: int = 2
    nproc: int | None = None
    environment: dict = field(default_factory=dict)
    stdout: str | None = None  # a file instead of a pipe
    shell: str | None = None  # runs before the program, in a mount namespace of its own
    limit_bytes: int | None = None  # largest file


TRAIN = ["train", "--config", "{config}", "--out", "{out}"]


def train(*extra: str) -> list[str]:
    return [*TRAIN, *extra]


def data_case(parts, prepare, **more) -> Case:
    return Case(train("--data.train", "{folder}/bad"), parts, prepare, **more)


def token_file(job: Job, count: int = 1000, dtype: str | None = None, name: str = "bad") -> Path:
    ids = np.arange(count) % 64
    prefix = job.folder / name
    write_token_file(prefix, [ids], **({"dtype": dtype} if dtype else {}))
    return prefix


def index_bytes(code: int = 8, lengths=(1000,), pointers=(0,), documents=(0, 1)) -> bytes:
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    return head + body + struct.pack(f"<{len(documents)}q", *documents)


def raw(index: bytes, tokens: bytes = b"\1\0" * 1000):
    def prepare(job: Job) -> None:
        (job.folder / "bad.idx").write_bytes(index)
        (job.folder / "bad.bin").write_bytes(tokens)

    return prepare


def cut(suffix: str, keep: int):
    def prepare(job: Job) -> None:
        path = Path(f"{token_file(job)}{suffix}")
        path.write_bytes(path.read_bytes()[:keep])

    return prepare


def remove(suffix: str):
    return lambda job: Path(f"{token_file(job)}{suffix}").unlink()


def loss_mask(values, job: Job) -> None:
    token_file(job)
    write_token_file(job.folder / "bad_loss_mask", [np.asarray(values)], dtype="uint8")


DATA = {
    "absent": Case(
        train("--data.train", "absent"), ["absent.idx", "mtraining.prepare", "quickstart"]
    ),
    "absent on three ranks": Case(train("--data.train", "absent"), ["absent.idx"], nproc=3),
    "no index": data_case(["bad.idx: cannot be opened"], remove(".idx")),
    "no tokens": data_case(["bad.bin: cannot be opened"], remove(".bin")),
    "valid absent": Case(train("--data.valid", "{folder}/gone"), ["gone.idx: cannot be opened"]),
    "index is a folder": data_case(
        ["bad.idx"], lambda job: [remove(".idx")(job), (job.folder / "bad.idx").mkdir()]
    ),
    "index empty": data_case(["bad.idx"], cut(".idx", 0)),
    "index cut in its magic": data_case(["bad.idx"], cut(".idx", 5)),
    "index cut in its counts": data_case(["bad.idx"], cut(".idx", 30)),
    "index cut in its lengths": data_case(["bad.idx"], cut(".idx", 36)),
    "index cut by a byte": data_case(["bad.idx"], cut(".idx", 34 + 4 + 8 + 16 - 1)),
    "index longer": data_case(["bad.idx"], raw(index_bytes() + b"\0")),
    "tokens cut": data_case(["bad.idx", "bad.bin"], cut(".bin", 99)),
    "tokens empty": data_case(["bad"], cut(".bin", 0)),
    "foreign index": data_case(["bad.idx", "MMIDIDX"], raw(b"PK\3\4" + b"\0" * 100)),
    "version 2": data_case(
        ["bad.idx", "offset 9", "version 1"], raw(b"MMIDIDX\0\0\2" + b"\0" * 60)
    ),
    "float tokens": data_case(
        ["bad.idx", "f32 holds no token ids"], raw(index_bytes(code=7), b"\0" * 4000)
    ),
    "unknown dtype code": data_case(["bad.idx", "offset 17"], raw(index_bytes(code=9))),
    "negative length": data_case(["bad.idx"], raw(index_bytes(lengths=(-5,)))),
    "length beyond the file": data_case(["bad"], raw(index_bytes(lengths=(1001,)))),
    "pointer beyond the file": data_case(["bad"], raw(index_bytes(pointers=(8,)))),
    "pointer before the file": data_case(["bad"], raw(index_bytes(pointers=(-2,)))),
    "documents descend": data_case(["bad.idx"], raw(index_bytes(documents=(1, 0)))),
    "documents beyond the sequences": data_case(["bad.idx"], raw(index_bytes(documents=(0, 7)))),
    "counts beyond the file": data_case(
        ["bad.idx"], raw(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1 << 60, 1 << 60))
    ),
    "no sequence": data_case(
        ["bad"], raw(index_bytes(lengths=(), pointers=(), documents=(0,)), b"")
    ),
    "an empty sequence": data_case(["bad", "257"], raw(index_bytes(lengths=(0,)), b"")),
    "shorter than a sample": data_case(
        ["bad.bin", "40 tokens", "257"], lambda job: token_file(job, 40)
    ),
    "shorter on three ranks": data_case(
        ["bad.bin", "40 tokens", "257"], lambda job: token_file(job, 40), nproc=3
    ),
    "id beyond the vocabulary": data_case(
        ["bad.bin: offset"], raw(index_bytes(), struct.pack("<H", 300) * 1000)
    ),
    "negative id": data_case(
        ["bad.bin: offset"], raw(index_bytes(code=4), struct.pack("<i", -1) * 1000)
    ),
    "loss mask of another length": data_case(
        ["bad_loss_mask", "999", "1000"], lambda job: loss_mask([1] * 999, job)
    ),
    "loss mask that is no mask": data_case(
        ["bad_loss_mask"], lambda job: loss_mask([2] * 1000, job)
    ),
}


def config_is(make):
    return Case(
        ["train", "--config", "{folder}/bad.toml", "--out", "{out}"],
        ["bad.toml"],
        lambda job: make(job.folder / "bad.toml"),
    )


CONFIGURATION = {
    "config absent": config_is(lambda path: None),
    "config is a folder": config_is(lambda path: path.mkdir()),
    "config is a pipe": config_is(os.mkfifo),  # opening it would wait for a writer
    "config is no text": config_is(lambda path: path.write_bytes(bytes(range(256)))),
    "config is empty": Case(
        ["train", "--config", "{folder}/bad.toml"],
        ["model.vocab_size: not given"],
        lambda job: (job.folder / "bad.toml").write_text(""),
    ),
}

# ---------------------------------------------------------------- where a run writes


def holds_a_run(job: Job) -> None:
    job.out.mkdir()
    (job.out / "config.toml").write_text("mine\n")
    (job.out / "metrics.jsonl").write_text('{"train_step": 1}\n')
    (job.out / "summary.json").write_text("{}")


def is_file(job: Job) -> None:
    (job.folder / "file").write_text("")


def mounts_are_allowed() -> bool:
    """Whether this user may mount in a namespace of its own: root, where the container lets it."""
    probe = ["unshare", "-m", "sh", "-ec", "mount -t tmpfs -o size=4k tmpfs /mnt"]
    return (
        bool(shutil.which("unshare")) and subprocess.run(probe, capture_output=True).returncode == 0
    )


MOUNTS = mounts_are_allowed()
SMALL_DISK = 'mkdir -p "{out}" && mount -t tmpfs -o size=12k tmpfs "{out}"'
READ_ONLY = 'mkdir -p "{out}" && mount --bind "{out}" "{out}" && mount -o remount,ro,bind "{out}"'

RESUME = {
    "resume from nowhere": Case(
        train("--resume", "{folder}/gone"), ["--resume", "gone", "none of that name"]
    ),
    "resume from a foreign folder": Case(train("--resume", "{folder}"), ["--resume", "{folder}"]),
    "resume from a file": Case(train("--resume", "{config}"), ["--resume", "tiny.toml"]),
    "begin from nowhere": Case(train("--model.init_from", "{folder}/gone"), ["gone"]),
    "begin from a foreign folder": Case(
        train("--model.init_from", "{folder}/empty"),
        ["empty", "config.json"],
        lambda job: (job.folder / "empty").mkdir(),
    ),
}

WRITING = {
    "out holds a run": Case(train(), ["{out}", "metrics.jsonl"], holds_a_run),
    "out holds a run, two ranks": Case(train(), ["{out}", "metrics.jsonl"], holds_a_run, nproc=2),
    "data is looked at before out": Case(
        train("--data.train", "absent", "--resume", "never"), ["absent.idx"], holds_a_run
    ),
    "out is a file": Case(
        ["train", "--config", "{config}", "--out", "{folder}/file"],
        ["Not a directory", "{folder}/file"],
        is_file,
    ),
    "out below a file": Case(
        ["train", "--config", "{config}", "--out", "{folder}/file/run"],
        ["Not a directory", "{folder}/file"],
        is_file,
    ),
    "out that the system refuses": Case(
        ["train", "--config", "{config}", "--out", "/sys/kernel/run"], ["/sys/kernel/run"], code=1
    ),
}
# Where nothing may be mounted, the system's own read-only tree and a limit on files stand in.
for ranks in (None, 2):
    name = f" on {ranks or 1} ranks"
    WRITING["out is read-only" + name] = (
        Case(train(), ["{out}", "Read-only file system"], code=1, shell=READ_ONLY, nproc=ranks)
        if MOUNTS
        else Case(train("--out", "/proc/sys/run"), ["/proc/sys/run"], code=1, nproc=ranks)
    )
    steps = train("--train.steps", "40")
    WRITING["disk fills" + name] = (
        Case(steps, ["{out}", "No space left on device"], code=1, shell=SMALL_DISK, nproc=ranks)
        if MOUNTS
        else Case(steps, ["{out}", "File too large"], code=1, limit_bytes=6000, nproc=ranks)
    )
    WRITING["files may not grow" + name] = Case(
        steps, ["{out}", "File too large"], code=1, limit_bytes=6000, nproc=ranks
    )

# ---------------------------------------------------------------- other verbs


def safetensors(job: Job, header: bytes, data: bytes = b"") -> None:
    (job.folder / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


def weights_case(parts, header: str, data: bytes = b"") -> Case:
    return Case(
        ["inspect", "{folder}/bad.safetensors"],
        ["bad.safetensors", *parts],
        lambda job: safetensors(job, header.encode(), data),
    )


def entry(name="a", dtype="F32", shape="[2]", begin=0, end=8) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def folder_with(**files: str):
    def prepare(job: Job) -> None:
        for name, text in files.items():
            path = job.folder / "bad" / name.replace("__", ".").replace("SLASH", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return prepare


HF_CONFIG = json.dumps(
    {
        "model_type": "qwen2",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)


def hf_case(parts, config: str, *command: str) -> Case:
    return Case(
        list(command) or ["inspect", "{folder}/bad"], parts, folder_with(config__json=config)
    )


def changed(**keys) -> str:
    return json.dumps(json.loads(HF_CONFIG) | keys)


INSPECT = {
    "inspect nothing": Case(["inspect"], ["PATH"]),
    "inspect two": Case(["inspect", "a", "b"], ["b"]),
    "inspect an empty name": Case(["inspect", ""], ["inspect"]),
    "inspect an unknown flag": Case(["inspect", "x", "--jsn"], ["--jsn", "--json"]),
    "inspect what is not there": Case(["inspect", "{folder}/gone"], ["gone: cannot be opened"]),
    "inspect a text": Case(["inspect", "{config}"], ["tiny.toml", "of another kind"]),
    "inspect a device": Case(["inspect", "/dev/null"], ["/dev/null", "regular file"]),
    "inspect a foreign folder": Case(["inspect", "{folder}"], ["{folder}", "none of them"]),
    "inspect half a token file": Case(["inspect", "{folder}/bad"], ["bad.bin"], remove(".bin")),
    "inspect a cut token file": Case(["inspect", "{folder}/bad.idx"], ["bad.idx"], cut(".idx", 40)),
    "inspect a mask that does not fit": Case(
        ["inspect", "{folder}/bad"],
        ["bad_loss_mask.idx", "1000", "999"],
        lambda job: loss_mask([1] * 999, job),
    ),
    "weights: cut length": Case(
        ["inspect", "{folder}/bad.safetensors"],
        ["bad.safetensors"],
        lambda job: (job.folder / "bad.safetensors").write_bytes(b"\1\2\3"),
    ),
    "weights: header beyond the file": Case(
        ["inspect", "{folder}/bad.safetensors"],
        ["bad.safetensors"],
        lambda job: (job.folder / "bad.safetensors").write_bytes(struct.pack("<Q", 1 << 40)),
    ),
    "weights: no JSON": weights_case([], "{nonsense"),
    "weights: a name twice": weights_case(
        ["a"], "{" + entry() + "," + entry(begin=8, end=16) + "}", b"\0" * 16
    ),
    "weights: shape and range disagree": weights_case(
        [], "{" + entry(shape="[3]") + "}", b"\0" * 8
    ),
    "weights: range beyond the file": weights_case([], "{" + entry(end=8) + "}", b"\0" * 4),
    "weights: a hole": weights_case([], "{" + entry(begin=4, end=12) + "}", b"\0" * 12),
    "weights: unknown dtype": weights_case(["F7"], "{" + entry(dtype="F7") + "}", b"\0" * 8),
    "model: no JSON": hf_case(["config.json"], "{"),
    "model: another family": hf_case(["gpt2"], changed(model_type="gpt2")),
    "model: heads do not divide": hf_case(["num_key_value_heads"], changed(num_key_value_heads=3)),
    "model: sliding window": hf_case(
        ["sliding"], changed(use_sliding_window=True, sliding_window=128, max_window_layers=0)
    ),
    "model: a key missing": hf_case(["vocab_size"], HF_CONFIG.replace("vocab_size", "vocab")),
    "model: no weights": hf_case(["bad", "model.safetensors"], HF_CONFIG),
    "checkpoint: not complete": Case(
        ["inspect", "{folder}/bad"],
        ["bad", "complete.json"],
        folder_with(config__json=HF_CONFIG, training_stateSLASHx="x"),
    ),
    "state: a rank missing": Case(
        ["inspect", "{folder}/bad"], ["rank-"], folder_with(**{"rank-00000-of-00002__json": "{}"})
    ),
    "run: metrics of another form": Case(
        ["inspect", "{folder}/bad"],
        ["metrics.jsonl", "offset 20"],
        folder_with(metrics__jsonl='{"train_step": 1}\nnot json\n'),
    ),
    "run: metrics are a pipe": Case(  # opening it would wait for a writer
        ["inspect", "{folder}/bad"],
        ["metrics.jsonl: expected a file"],
        lambda job: [(job.folder / "bad").mkdir(), os.mkfifo(job.folder / "bad/metrics.jsonl")],
    ),
}

CONVERT = {
    "convert nothing": Case(["convert"], ["FROM"]),
    "convert without a target": Case(["convert", "{folder}"], ["TO"]),
    "convert what is not there": Case(
        ["convert", "{folder}/gone", "{folder}/new"], ["gone", "none of that name"]
    ),
    "convert a file": Case(["convert", "{config}", "{folder}/new"], ["tiny.toml", "got a file"]),
    "convert a foreign folder": Case(
        ["convert", "{folder}", "{folder}/new"], ["{folder}", "Hugging Face folder"]
    ),
    "convert onto something": Case(["convert", "{folder}", "{config}"], ["tiny.toml", "got one"]),
    "convert to another form": Case(
        ["convert", "{folder}", "{folder}/new", "--to", "gguf"], ["--to", "hf or state", "gguf"]
    ),
    "convert to another dtype": Case(
        ["convert", "{folder}", "{folder}/new", "--dtype", "fp8"], ["--dtype", "fp8"]
    ),
    "convert for no rank": Case(
        ["convert", "{folder}", "{folder}/new", "--ranks", "0"], ["--ranks", "1 to 65536"]
    ),
    "convert for half a rank": Case(
        ["convert", "{folder}", "{folder}/new", "--ranks", "1.5"], ["--ranks", "1.5"]
    ),
    "convert without weights": hf_case(
        ["bad", "model.safetensors"], HF_CONFIG, "convert", "{folder}/bad", "{folder}/new"
    ),
    "convert to a state without its run": hf_case(
        ["--config"], HF_CONFIG, "convert", "{folder}/bad", "{folder}/new", "--to", "state"
    ),
}

VERBS = {
    "unknown verb": Case(["trian"], ["unknown verb trian", "train"]),
    "train without a configuration": Case(["train"], ["--config"]),
    "train with an unknown flag": Case(
        ["train", "--confg", "x"], ["unknown flag --confg", "--config"]
    ),
    "doctor with an unknown flag": Case(["doctor", "--jsom"], ["--jsom", "--json"]),
    "doctor with a word": Case(["doctor", "please"], ["please"]),
    "simulate without a topology": Case(["simulate"], ["--topology"]),
    "simulate with another topology": Case(["simulate", "--topology", "4"], ["NODESxRANKS", "4"]),
    "bench without a subject": Case(["bench"], ["attention"]),
    "bench of something else": Case(["bench", "speed"], ["speed"]),
    "MASTER_PORT with a letter": Case(
        train(),
        ["MASTER_PORT"],
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599x"},
    ),
}

PRINTING = {
    f"{' '.join(arguments)} into a full device": Case(
        arguments, ["standard output cannot be written: No space"], code=1, stdout="/dev/full"
    )
    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["train", "--config", "{config}", "--dry-run"],
        ["doctor", "--no-links"],
        ["inspect", "{data}"],
        ["inspect", "{data}", "--json"],
    )
}

TABLE = {**DATA, **CONFIGURATION, **RESUME, **WRITING, **INSPECT, **CONVERT, **VERBS, **PRINTING}


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.is_fifo()
    }


def limit(case: Case):
    if case.limit_bytes is None:
        return None

    def set_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.limit_bytes, case.limit_bytes))

    return set_limit


@pytest.mark.parametrize("name", TABLE)
def test_bad_input_is_one_sentence(job, name):
    case = TABLE[name]
    names = {"folder": job.folder, "out": job.out, "config": job.config, "data": job.data}

    def fill(text: str) -> str:
        for key, value in names.items():
            text = text.replace("{" + key + "}", str(value))
        return text

    if case.prepare:
        case.prepare(job)
    command = [str(job.binary), *map(fill, case.arguments)]
    if case.nproc:
        command += ["--nproc", str(case.nproc)]
    if case.shell:
        # A namespace of this command alone: what it mounts goes with it.
        command = ["unshare", "-m", "sh", "-ec", fill(case.shell) + '\nexec "$@"', "sh", *command]
    before = tree(job.folder)
    with open(case.stdout or os.devnull, "w") as out:
        result = subprocess.run(
            command,
            cwd=job.folder,
            env={**job.environment(), **case.environment},
            stdout=out if case.stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            preexec_fn=limit(case),
        )
    result.stdout = result.stdout or ""
    assert_one_sentence(result, *map(fill, case.parts), code=case.code)
    assert len(result.stderr) < 1500
    if case not in WRITING.values() or case.code == 2:
        assert tree(job.folder) == before  # nothing is half-written


@pytest.mark.parametrize("nproc", [None, 2])
def test_two_launches_into_one_folder_do_not_mix(job, nproc):
    job.out.mkdir()
    with open(job.out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run that goes on holds it
        assert_one_sentence(job.run(nproc=nproc), str(job.out), "in use")
        assert {path.name for path in job.out.iterdir()} == {".lock"}
    assert job.run(nproc=nproc).returncode == 0  # it has ended


@pytest.mark.parametrize("name", ["config.toml", "summary.json"])
def test_a_full_disk_is_named_with_the_file(job, name):
    job.out.mkdir()
    (job.out / name).symlink_to("/dev/full")
    assert_one_sentence(job.run(), f"{name}: ", "No space left on device", code=1)


def test_the_launchers_variables_agree(job):
    good = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    good |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    cases = [
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"MASTER_PORT": "4294996895"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR: no-such-host.invalid"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "local rank"),
    ]
    for change, part in cases:
        assert_one_sentence(job.run(env={**good, **change}, timeout=20), part)
