"""What the executable says to wrong input: one sentence, exit 2, before data is opened."""

import fcntl
import json
import os
import socket
import subprocess

import numpy as np
import pytest
from mtraining.prepare import write_token_file


def assert_one_sentence(result, *parts: str, code: int = 2) -> None:
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr + result.stdout
    assert lines[0].startswith("mtraining: error: "), lines[0]
    for part in parts:
        assert part in lines[0], (part, lines[0])
    assert result.returncode == code, lines[0]


# extra arguments, ranks, what the sentence must hold
BAD_VALUES = [
    (["--train.stepz", "3"], None, ["unknown key train.stepz", "nearest known key: train.steps"]),
    (
        ["--set", "attention.patern=dense"],
        None,
        ["--set attention.patern=dense", "attention.pattern"],
    ),
    (["--set", "train.steps"], None, ["--set", "expected key=value"]),
    (["--stepz"], None, ["unknown flag --stepz", "--set"]),
    (["--train.steps"], None, ["--train.steps", "expected a value"]),
    (["--train.steps", "0"], None, ["train.steps", "at least 1", "got 0"]),
    (["--train.steps", "-4"], None, ["train.steps", "got -4"]),
    (["--train.steps", "many"], None, ["train.steps", "whole number", "many"]),
    (["--train.steps", "2.5"], None, ["train.steps", "whole number", "2.5"]),
    (["--train.tokens", "100"], None, ["train.steps", "exactly one", "both"]),
    (["--train.seq_len", "0"], None, ["train.seq_len"]),
    (["--train.seed", "-1"], None, ["train.seed", "at least 0"]),
    (
        ["--train.global_batch_size", "3", "--train.micro_batch_size", "2"],
        None,
        ["global_batch_size"],
    ),
    (["--train.recompute", "layer"], None, ["train.recompute", 'only "none" is built']),
    (["--optim.grad_dtype", "bf16"], None, ["optim.grad_dtype"]),
    (["--optim.lr", "-1"], None, ["optim.lr"]),
    (["--optim.betas", "[0.9, 1.0]"], None, ["optim.betas", "[0, 1)"]),
    (["--optim.betas", "0.9"], None, ["optim.betas", "two finite numbers"]),
    (["--optim.schedule", "linear"], None, ["optim.schedule", '"constant" or "cosine"', "linear"]),
    (["--optim.min_lr_ratio", "2"], None, ["optim.min_lr_ratio"]),
    (["--optim.clip_norm", "-1"], None, ["optim.clip_norm"]),
    (["--attention.pattern", "moba"], None, ["attention.pattern", '"vertical_slash"', "moba"]),
    (["--attention.p_slash", "1.5"], None, ["p_slash", "1.5"]),
    (["--attention.p_vertical", "-0.1"], None, ["p_vertical"]),
    (["--attention.last_q", "0"], None, ["--set attention.last_q=0: attention.last_q: expected"]),
    (["--attention.local_blocks", "0"], None, [": attention.local_blocks: expected"]),
    (["--attention.stripe", "48"], None, ["attention.stripe", "multiple of 64", "48"]),
    (["--attention.layout", "striped"], None, ["attention.layout", "striped", "dense"]),
    (["--attention.layers", "[]"], None, ["attention.layers", "not built"]),
    (["--checkpoint.every", "5"], None, ["checkpoint.every", "not built"]),
    (["--data.document_mask", "true"], None, ["data.document_mask", "not built"]),
    (["--data.train", "[{path = 'x', wight = 1}]"], None, ["data.train", "weight"]),
    (["--data.train", "[]"], None, ["data.train", "at least one"]),
    (["--model.head_dim", "12"], None, ["model.head_dim", "multiple of 8"]),
    (["--model.num_key_value_heads", "3"], None, ["num_attention_heads", "multiple"]),
    (["--model.vocab_size", "0"], None, ["model.vocab_size"]),
    (["--model.architecture", "gpt"], None, ["model.architecture", "qwen2"]),
    (["--model.dtype", "fp8"], None, ["model.dtype", '"float32"']),
    (["--parallel.cp_size", "3"], 4, ["parallel.cp_size", "3", "4"]),
    (["--parallel.cp_size", "0"], 1, ["parallel.cp_size"]),
    (["--parallel.dp_size", "3"], 4, ["parallel.dp_size", "divisor"]),
    (["--parallel.cp_inner_size", "3"], 4, ["cp_inner_size", "3"]),
    (["--parallel.cp_inner_size", "0"], 4, ["cp_inner_size"]),
    (["--attention.ring", "flat", "--attention.ring_stride", "2"], 4, ["ring_stride"]),
    (["--nproc", "0"], None, ["--nproc", "0"]),
    (["--nproc", "two"], None, ["--nproc", "two"]),
    (["--resume", "auto"], None, ["--resume", "never"]),
    (["--trace.example_layer", "2"], None, ["trace.example_layer", "-1 to 1"]),
    (["--eval.also_p", "[2.0]"], None, ["eval.also_p"]),
    (["--eval.also_p", "[nan]"], None, ["eval.also_p", "finite"]),
    (["--optim.lr", "inf"], None, ["optim.lr", "finite"]),
    (["--optim.lr", "nan"], None, ["optim.lr", "finite"]),
    (["--optim.betas", "[nan, 0.9]"], None, ["optim.betas", "finite"]),
    (["--optim.clip_norm", "inf"], None, ["optim.clip_norm", "finite"]),
    (["--optim.eps", "inf"], None, ["optim.eps", "finite"]),
    (["--optim.weight_decay", "nan"], None, ["optim.weight_decay", "finite"]),
    (["--model.initializer_range", "inf"], None, ["model.initializer_range", "finite"]),
    (["--train.stop_grace_s", "inf"], None, ["train.stop_grace_s", "finite"]),
    (["--data.train", "[{path = 'x', weight = inf}]"], None, ["data.train", "weight"]),
    (["--data.train", "[{path = 'x', weight = 0}]"], None, ["data.train", "positive finite"]),
    (["--data.train", "[{path = 'x', weight = -1.5}]"], None, ["data.train", "-1.5"]),
    (["--data.train", "''"], None, ["data.train", "expected a path"]),
    (["--data.valid", "['']"], None, ["data.valid", "expected a path"]),
    (["--model.head_dim", "520"], None, ["model.head_dim", "up to 512", "520"]),
    (["--model.num_hidden_layers", "10001"], None, ["num_hidden_layers", "10000"]),
    (["--model.hidden_size", "9007199254740993"], None, ["parameters", "2^40"]),
    (["--model.vocab_size", "1099511627776"], None, ["parameters", "2^40"]),
    (["--train.steps", "x" * 5000], None, ["train.steps", "xxx..."]),
    (["--" + "a." * 3000 + "b", "1"], None, ["unknown key", "..."]),
    (["--optim.betas", "[" * 50000], None, ["nested deeper"]),
]


@pytest.mark.parametrize(
    ("extra", "nproc", "parts"), BAD_VALUES, ids=[" ".join(case[0])[:60] for case in BAD_VALUES]
)
def test_wrong_values_are_named_before_data_is_opened(job, extra, nproc, parts):
    job.data.with_suffix(".idx").unlink()  # opening it would be another error
    result = job.run(*extra, nproc=nproc)
    assert_one_sentence(result, *parts)
    assert len(result.stderr) < 1000
    assert not job.out.exists()


@pytest.mark.parametrize("extra", ["model.head_dim=520", "data.train=''", "optim.lr=inf"])
def test_a_dry_run_finds_them_too(job, extra):
    assert_one_sentence(job.run("--dry-run", "--set", extra), extra.split("=")[0])


BAD_FILES = [
    ("[train\nsteps = 3", ["tiny.toml:1"]),
    ("[train]\nsteps = = 3", ["tiny.toml:2"]),
    ("[train]\nsteps = 3\nsteps = 4", ["tiny.toml:3"]),
    ("[train]\nseq_len = 256\nsteps = 3\nstep = 4", ["tiny.toml:4", "train.step;", "train.steps"]),
    ("[trian]\nsteps = 3", ["tiny.toml:2", "trian.steps", "train.steps"]),
    ("[train]\nsteps = 'x'", ["tiny.toml:2", "train.steps", "whole number"]),
    ("train = 3", ["tiny.toml:1", "unknown key train"]),
    ("[model]\ninit_from = 'x'", ["tiny.toml:2", "model.init_from", "not built"]),
    ("", ["model.vocab_size: not given"]),
    ("[model]\nvocab_size = 8", ["tiny.toml: model.hidden_size: not given"]),
    (".".join(["a"] * 50000) + " = 1", ["tiny.toml", "nested deeper than 32"]),
    ("[" + " . ".join(["a"] * 50000) + "]", ["tiny.toml", "nested deeper than 32"]),
    ("a = " + "{a=" * 50000, ["tiny.toml", "nested deeper than 32"]),
    ('a = """x"y"""\n' + ".".join(["a"] * 50000) + " = 1", ["tiny.toml", "nested deeper"]),
    ("# " + "." * 100 + "\n[data]\ntrain = '" + "../" * 50 + "x'", ["model.vocab_size: not given"]),
    ("x = 1 # " + "." * (1 << 20), ["tiny.toml", "at most 1048576 bytes"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD_FILES)
def test_wrong_files_are_named_with_their_line(job, text, parts):
    job.config.write_text(text)
    assert_one_sentence(job.run(), *parts)


def test_a_value_out_of_range_names_its_line(job):
    text = job.config.read_text().replace("steps = 3", "steps = 0")
    line = text.splitlines().index("steps = 0") + 1
    job.config.write_text(text)
    assert_one_sentence(job.run(), f"tiny.toml:{line}: train.steps")


def test_missing_configuration(job):
    assert_one_sentence(job.run("--config", "absent.toml"), "absent.toml")
    assert_one_sentence(job.run("--config", str(job.folder)), "cannot be opened")
    pipe = job.folder / "pipe"
    os.mkfifo(pipe)  # opening it would wait for a writer
    assert_one_sentence(job.run("--config", str(pipe), timeout=10), "not a regular file")


@pytest.mark.parametrize("nproc", [None, 3])
def test_data_faults_are_said_once_with_file_and_offset(job, nproc):
    assert_one_sentence(
        job.run("--data.train=absent", nproc=nproc), "absent.idx", "mtraining.prepare", "quickstart"
    )
    short = job.folder / "short"
    write_token_file(short, [np.arange(40)])
    result = job.run(f"--data.train={short}", nproc=nproc)
    assert_one_sentence(result, "short.bin", "40 tokens", "257")
    broken = job.folder / "broken"
    write_token_file(broken, [np.arange(40)])
    (job.folder / "broken.idx").write_bytes(b"MMIDIDX\0\0\2" + b"\0" * 60)
    assert_one_sentence(job.run(f"--data.train={broken}", nproc=nproc), "offset 9", "version 1")
    wide = job.folder / "wide"
    write_token_file(wide, [np.arange(1000) % 300], dtype="uint16")
    assert_one_sentence(job.run(f"--data.train={wide}", nproc=nproc), "wide.bin: offset")
    assert not job.out.exists()


def test_results_that_are_there_are_kept(job):
    job.out.mkdir()
    kept = {"config.toml": "mine\n", "metrics.jsonl": '{"train_step": 1}\n', "summary.json": "{}"}
    for name, text in kept.items():
        (job.out / name).write_text(text)
    for nproc in (None, 2):
        assert_one_sentence(job.run(nproc=nproc), str(job.out), "metrics.jsonl")
        assert_one_sentence(job.run("--data.train=absent", nproc=nproc), "absent.idx")
    assert {name: (job.out / name).read_text() for name in kept} == kept


@pytest.mark.parametrize("nproc", [None, 2])
def test_two_launches_into_one_folder_do_not_mix(job, nproc):
    job.out.mkdir()
    with open(job.out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run that goes on holds it
        assert_one_sentence(job.run(nproc=nproc), str(job.out), "in use")
        assert {path.name for path in job.out.iterdir()} == {".lock"}
    assert job.run(nproc=nproc).returncode == 0  # it has ended


def test_an_out_that_is_no_folder_is_a_mistake(job):
    (job.folder / "file").write_text("")
    for out in ("file", "file/run"):
        result = job.run("--out", str(job.folder / out))
        assert_one_sentence(result, "Not a directory", str(job.folder / "file"))


def test_the_launchers_variables_agree(job):
    good = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    good |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    cases = [
        ({"MASTER_PORT": "29599x"}, "MASTER_PORT"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"MASTER_PORT": "4294996895"}, "MASTER_PORT"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR: no-such-host.invalid"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "local rank"),
    ]
    for change, part in cases:
        assert_one_sentence(job.run(env={**good, **change}, timeout=20), part)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--dry-run"]])
def test_output_that_cannot_be_written_is_a_failure(job, arguments):
    command = [str(job.binary), *arguments]
    if "--dry-run" in arguments:
        command += ["--config", str(job.config)]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=job.environment()
        )
    assert result.returncode == 1
    assert "standard output cannot be written: No space left" in result.stderr


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_run_goes_on_when_nobody_reads_its_progress(job, nproc):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(job.command(nproc=nproc), stdout=write, env=job.environment())
    os.close(write)
    assert process.wait(60) == 0
    assert len((job.out / "metrics.jsonl").read_text().splitlines()) == 3


def test_numbers_of_the_resolved_configuration_are_short_and_exact(job):
    text = job.run("--optim.lr", "3e-4", "--data.train", f"{job.data}", "--dry-run").stdout
    for line in (
        "p_vertical = 0.9\n",
        "lr = 3e-04\n",
        "betas = [ 0.9, 0.95 ]\n",
        "clip_norm = 1.0\n",
    ):
        assert line in text, text


def test_hierarchical_ring_needs_the_ranks_of_a_node(job):
    env = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    assert_one_sentence(job.run(env=env), "parallel.cp_inner_size", "LOCAL_WORLD_SIZE")
    # It is known there: then it is not an error.
    assert job.run("--dry-run", env={**env, "LOCAL_WORLD_SIZE": "2"}).returncode == 0
    for inner in ("1", "4"):
        assert job.run("--dry-run", "--parallel.cp_inner_size", inner, env=env).returncode == 0
    assert job.run("--dry-run", "--attention.ring", "flat", env=env).returncode == 0


def test_launcher_and_nproc_exclude_each_other(job):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert_one_sentence(job.run(nproc=2, env=env), "--nproc", "torchrun")
    assert_one_sentence(job.run(env=env), "MASTER_ADDR")
    assert_one_sentence(job.run(env={**env, "RANK": "x"}), "RANK")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["unknown verb trian", "train"]),
        (["bench"], ["bench", "not built"]),
        (["train"], ["--config"]),
        (["train", "--confg", "x"], ["unknown flag --confg", "--config"]),
    ],
)
def test_wrong_verbs_and_flags(binary, environment, arguments, parts):
    result = subprocess.run(
        [binary, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert_one_sentence(result, *parts)


def test_help_has_examples(binary, environment):
    for arguments in (["--help"], ["train", "--help"]):
        result = subprocess.run(
            [binary, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        assert result.returncode == 0
        assert "examples:" in result.stdout


def test_a_run_writes_its_folder_and_a_resolved_configuration_that_repeats_it(job):
    result = job.run("--parallel.cp_inner_size", "2", nproc=4)
    assert result.returncode == 0, result.stderr
    assert "\r" not in result.stdout  # plain lines where there is no terminal
    assert "first batch: loss dense" in result.stdout
    names = {path.name for path in job.out.iterdir()}
    assert {"config.toml", "metrics.jsonl", "trace.json", "summary.json"} <= names
    first = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["train_step"] for row in first] == [1, 2, 3]
    trace = json.loads((job.out / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}

    again = job.folder / "again"
    job.config = job.out / "config.toml"
    repeated = job.run("--out", str(again), nproc=4)
    assert repeated.returncode == 0, repeated.stderr
    second = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


def test_override_forms_agree(job):
    forms = [
        ["--set", "train.steps=2"],
        ["--set=train.steps=2"],
        ["--train.steps", "2"],
        ["--train.steps=2"],
    ]
    outputs = {job.run(*form, "--dry-run").stdout for form in forms}
    assert len(outputs) == 1
    assert "steps = 2" in outputs.pop()
    assert not job.out.exists()


def test_torchrun_environment_is_understood(job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            job.command(),
            cwd=job.folder,
            env={
                **job.environment(),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "train_step 3/3" in outputs[0][0]
    assert outputs[1][0] == ""  # only rank 0 prints


def test_two_launches_at_once_do_not_meet(job):
    other = job.folder / "other"
    first = subprocess.Popen(job.command(nproc=2), env=job.environment(), stdout=subprocess.DEVNULL)
    second = subprocess.Popen(
        [*job.command(nproc=2), "--out", str(other)],
        env=job.environment(),
        stdout=subprocess.DEVNULL,
    )
    assert [first.wait(60), second.wait(60)] == [0, 0]
