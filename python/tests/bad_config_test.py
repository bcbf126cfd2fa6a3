"""Wrong configurations, one table of values and one of files: each is one sentence with the key and its place, before data is opened."""

import resource
import subprocess

import pytest

from python.tests.conftest import assert_one_sentence

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
    (["--train.steps", str(2**63 - 1)], None, ["train.steps", "expected at most"]),
    (["--set", "train.steps=3\nfoo = 1"], None, ["train.steps", "whole number", "foo = 1"]),
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
    (["--train.recompute", "all"], None, ["train.recompute", '"except_attention"', "all"]),
    (["--train.mlp_tile", "-1"], None, ["train.mlp_tile", "at least 0", "-1"]),
    (["--optim.grad_dtype", "fp16"], None, ["optim.grad_dtype", '"float32" or "bf16"', "fp16"]),
    (["--parallel.zero", "1"], None, ["parallel.zero", "0 or 2", "got 1"]),
    (["--parallel.offload_optimizer", "1"], None, ["offload_optimizer", "true or false"]),
    (["--optim.lr", "-1"], None, ["optim.lr"]),
    (["--optim.betas", "[0.9, 1.0]"], None, ["optim.betas", "[0, 1)"]),
    (["--optim.betas", "0.9"], None, ["optim.betas", "two finite numbers"]),
    (["--optim.schedule", "step"], None, ["optim.schedule", '"cosine" or "linear"', "step"]),
    (["--optim.min_lr_ratio", "2"], None, ["optim.min_lr_ratio"]),
    (["--optim.clip_norm", "-1"], None, ["optim.clip_norm"]),
    (["--attention.pattern", "window"], None, ["attention.pattern", '"vertical_slash"', "window"]),
    (["--attention.p_slash", "1.5"], None, ["p_slash", "1.5"]),
    (["--attention.p_vertical", "-0.1"], None, ["p_vertical"]),
    (["--attention.last_q", "0"], None, ["--set attention.last_q=0: attention.last_q: expected"]),
    (["--attention.local_blocks", "0"], None, [": attention.local_blocks: expected"]),
    (["--attention.stripe", "48"], None, ["attention.stripe", "multiple of 64", "48"]),
    (["--attention.layout", "striped"], None, ["attention.layout", "striped", "dense"]),
    (["--attention.layers", "3"], None, ["attention.layers", "[[attention.layers]]", "got 3"]),
    (["--attention.layers", "[{}]"], None, ["attention.layers[0].range: not given"]),
    (["--attention.layers", "[{range = '1-'}]"], None, ["layers[0].range", '"0-3" or 5', "1-"]),
    (["--attention.layers", "[{range = '0-2'}]"], None, ["layers[0].range", "0 to 1", "0-2"]),
    (
        ["--attention.layers", "[{range = 0}, {range = '0-1'}]"],
        None,
        ["attention.layers[1].range: layer 0 is in attention.layers[0] too"],
    ),
    (
        ["--attention.layers", "[{range = 0, p_slahs = 0.5}]"],
        None,
        ["unknown key attention.layers[0].p_slahs", "attention.layers[0].p_slash"],
    ),
    (
        ["--attention.layers", "[{range = 0, p_slash = 3.0}]"],
        None,
        ["attention.layers[0].p_slash", "[0, 1]", "got 3"],
    ),
    (["--attention.pattern", "fixed"], None, ["attention.pattern", "pattern_file", "neither"]),
    (["--attention.max_columns", str(2**63 - 1)], None, ["attention.max_columns", "below 2^31"]),
    (["--attention.fixed_columns", str(2**31)], None, ["attention.fixed_columns", "below 2^31"]),
    (["--attention.sm_margin", "1025"], None, ["attention.sm_margin: expected at most 1024"]),
    (["--attention.transfers", "peer_copies"], None, ["attention.transfers", "cpu"]),
    (["--attention.moba_chunk", "100"], None, ["attention.moba_chunk", "multiple of 64", "100"]),
    (["--attention.xattention_stride", "48"], None, ["xattention_stride", "divisor", "48"]),
    (
        ["--attention.pattern", "moba", "--attention.recall_floor", "0.5"],
        None,
        ["attention.recall_floor", "moba"],
    ),
    (["--train.peak_flops_per_s", "0"], None, ["train.peak_flops_per_s", "above 0", "got 0"]),
    (["--checkpoint.every", "-1"], None, ["checkpoint.every", "at least 0", "got -1"]),
    (["--checkpoint.keep", "-1"], None, ["checkpoint.keep", "at least 0", "got -1"]),
    (["--checkpoint.save_every_minutes", "inf"], None, ["save_every_minutes", "finite"]),
    (["--checkpoint.save_accumulation", "3"], None, ["save_accumulation", "true or false"]),
    (["--data.document_mask", "maybe"], None, ["data.document_mask", "maybe"]),
    (["--data.train", "[{path = 'x', wight = 1}]"], None, ["data.train", "weight"]),
    (["--data.train", "[]"], None, ["data.train", "at least one"]),
    (["--model.head_dim", "12"], None, ["model.head_dim", "multiple of 8"]),
    (["--model.num_key_value_heads", "3"], None, ["num_attention_heads", "multiple"]),
    (["--model.vocab_size", "0"], None, ["model.vocab_size"]),
    (["--model.architecture", "gpt"], None, ["model.architecture", "qwen2"]),
    (["--model.dtype", "fp8"], None, ["model.dtype", '"float32"']),
    (["--parallel.cp_size", "3"], 4, ["parallel.cp_size", "3", "4"]),
    (["--parallel.cp_size", "0"], 1, ["parallel.cp_size"]),
    (
        ["--parallel.cp_size", "2147483647", "--parallel.dp_size", "2147483647"],
        1,
        ["parallel.cp_size", "= 4611686014132420609 ranks"],
    ),
    (["--parallel.dp_size", "3"], 4, ["parallel.dp_size", "divisor"]),
    (["--parallel.cp_inner_size", "3"], 4, ["cp_inner_size", "3"]),
    (["--parallel.cp_inner_size", "0"], 4, ["cp_inner_size"]),
    (["--attention.ring", "flat", "--attention.ring_stride", "2"], 4, ["ring_stride"]),
    (["--nproc", "0"], None, ["--nproc", "0"]),
    (["--nproc", "two"], None, ["--nproc", "two"]),
    (["--resume="], None, ["--resume", '"auto"', '"never"']),
    (["--trace.example_layer", "2"], None, ["trace.example_layer", "-1 to 1"]),
    (["--eval.also_p", "[2.0]"], None, ["eval.also_p"]),
    (["--eval.also_p", "[nan]"], None, ["eval.also_p", "finite"]),
    (["--optim.lr", "inf"], None, ["optim.lr", "finite"]),
    (["--optim.lr", "nan"], None, ["optim.lr", "finite"]),
    (["--optim.betas", "[nan, 0.9]"], None, ["optim.betas", "finite"]),
    (["--optim.clip_norm", "inf"], None, ["optim.clip_norm", "finite"]),
    (["--optim.eps", "inf"], None, ["optim.eps", "finite"]),
    (["--optim.weight_decay", "nan"], None, ["optim.weight_decay", "finite"]),
    (["--model.rms_norm_eps", "1"], None, ["model.rms_norm_eps", "between 0 and 1, got 1"]),
    (["--model.vocab_size", str(2**31)], None, ["model.vocab_size", "2^31 - 1"]),
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


BAD_FILES = [
    ("[train\nsteps = 3", ["tiny.toml:1"]),
    ("[train]\nsteps = = 3", ["tiny.toml:2"]),
    ("[train]\nsteps = 3\nsteps = 4", ["tiny.toml:3"]),
    ("[train]\nseq_len = 256\nsteps = 3\nstep = 4", ["tiny.toml:4", "train.step;", "train.steps"]),
    ("[trian]\nsteps = 3", ["tiny.toml:2", "trian.steps", "train.steps"]),
    ("[train]\nsteps = 'x'", ["tiny.toml:2", "train.steps", "whole number"]),
    ("train = 3", ["tiny.toml:1", "unknown key train"]),
    ("train = {stepz = 3}", ["tiny.toml:1", "unknown key train.stepz", "train.steps"]),
    ('"train.steps" = 5\n[train]\nsteps = 3', ["train.steps: given twice, also at", "tiny.toml:3"]),
    ("[model]\ninit_from = 'x'", ["tiny.toml: train.seq_len: not given"]),
    (
        "[model]\ninit_from = 'x'\n[train]\nseq_len = 8",
        ["tiny.toml:2", "model.init_from", "config.json"],
    ),
    ("", ["model.vocab_size: not given"]),
    ("[model]\nvocab_size = 8", ["tiny.toml: model.hidden_size: not given"]),
    (".".join(["a"] * 50000) + " = 1", ["tiny.toml", "nested deeper than 32"]),
    ("[" + " . ".join(["a"] * 50000) + "]", ["tiny.toml", "nested deeper than 32"]),
    ("a = " + "{a=" * 50000, ["tiny.toml", "nested deeper than 32"]),
    ('a = """x"y"""\n' + ".".join(["a"] * 50000) + " = 1", ["tiny.toml", "nested deeper"]),
    ("# " + "." * 100 + "\n[data]\ntrain = '" + "../" * 50 + "x'", ["model.vocab_size: not given"]),
    ("x = 1 # " + "." * (1 << 20), ["tiny.toml", "at most 1048576 bytes"]),
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


@pytest.mark.parametrize(("text", "parts"), BAD_FILES)
def test_wrong_files_are_named_with_their_line(job, text, parts):
    job.config.write_text(text)
    assert_one_sentence(job.run(), *parts)


@pytest.mark.parametrize("wrong", ["steps = 0", f"tokens = {2**63 - 1}"])
def test_a_value_out_of_range_names_its_line(job, wrong):
    text = job.config.read_text().replace("steps = 3", wrong)
    line = text.splitlines().index(wrong) + 1
    job.config.write_text(text)
    assert_one_sentence(job.run(), f"tiny.toml:{line}: train.{wrong.split()[0]}: expected at")


def test_memory_that_is_not_to_be_had_is_said_in_bytes(job):
    words = 2**31 - 1
    result = subprocess.run(
        job.command("--model.vocab_size", str(words)),
        cwd=job.folder,
        env=job.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert_one_sentence(result, f"out of memory: a tensor of {words * 32 * 4} bytes", code=1)
