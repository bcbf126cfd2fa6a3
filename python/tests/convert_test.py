"""`mtraining convert` and `inspect`: what goes in is what comes out, whole or not at all."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from mtraining.prepare import write_token_file
from safetensors.torch import load_file, save_file

from python.tests.conftest import Job, assert_one_sentence, metrics_of


def call(job, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    command = [str(job.binary), *map(str, arguments)]
    result = subprocess.run(
        command, cwd=job.folder, env=job.environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == code, result.stderr
    return result


def inspect(job, path) -> dict:
    return json.loads(call(job, "inspect", path, "--json").stdout)


@pytest.fixture(scope="module")
def trained(binary, tmp_path_factory) -> Job:
    """A run of two ranks, whose checkpoint every test reads and none changes."""
    job = Job(binary, tmp_path_factory.mktemp("trained"))
    result = job.run("--eval.batches", "1", nproc=2)
    assert result.returncode == 0, result.stderr
    return job


@pytest.fixture
def checkpoint(trained) -> Path:
    return trained.out / "checkpoints" / "step-00000003"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a training state, put together from the pieces of all ranks."""
    whole: dict[str, torch.Tensor] = {}
    for described in sorted(folder.glob("rank-*.json")):
        pieces = load_file(described.with_suffix(".safetensors"))
        for piece in json.loads(described.read_text())["pieces"]:
            flat = whole.setdefault(
                piece["name"], torch.full((int(torch.Size(piece["shape"]).numel()),), float("nan"))
            )
            name = f"{piece['name']}[{piece['begin']}:{piece['end']}]"
            flat[piece["begin"] : piece["end"]] = pieces[name]
    return whole


def assert_same_state(left: Path, right: Path) -> None:
    a, b = state_of(left / "training_state"), state_of(right / "training_state")
    assert a.keys() == b.keys() and len(a) > 0
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_state_for_other_ranks_holds_the_same_values(trained, checkpoint, tmp_path, ranks):
    call(trained, "convert", trained.out, tmp_path / "new", "--ranks", ranks)
    assert_same_state(checkpoint, tmp_path / "new")
    assert len(list((tmp_path / "new/training_state").glob("*.safetensors"))) == ranks
    facts = inspect(trained, tmp_path / "new")
    assert facts["training_state"]["written_by_ranks"] == ranks
    assert facts["training_state"]["train_step"] == 3
    old = load_file(checkpoint / "model.safetensors")
    new = load_file(tmp_path / "new/model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def losses(folder: Path) -> list[float]:
    rows = metrics_of(folder)
    return [row["loss"] for row in rows]


def test_a_run_goes_on_from_a_state_for_other_ranks_as_from_its_own(trained, tmp_path):
    call(trained, "convert", trained.out, tmp_path / "new", "--ranks", 3)
    curves = []
    for number, start in enumerate((trained.out, tmp_path / "new")):
        out = tmp_path / f"run{number}"
        extra = ["--train.steps", "5", "--resume", str(start), "--out", str(out)]
        result = trained.run(*extra, nproc=2)
        assert result.returncode == 0, result.stderr
        curves.append(losses(out))
    assert len(curves[0]) == 2 and curves[0] == curves[1]


@pytest.mark.parametrize(
    ("dtype", "torch_dtype", "name"),
    [
        ("float32", torch.float32, "float32"),
        ("bf16", torch.bfloat16, "bfloat16"),
        ("fp16", torch.float16, "float16"),
    ],
)
def test_weights_are_the_masters_in_the_type_asked_for(
    trained, checkpoint, tmp_path, dtype, torch_dtype, name
):
    call(trained, "convert", checkpoint, tmp_path / "hf", "--dtype", dtype)
    weights = load_file(tmp_path / "hf/model.safetensors")
    masters = state_of(checkpoint / "training_state")
    assert {f"{n}/master" for n in weights} == {n for n in masters if n.endswith("/master")}
    for parameter, value in weights.items():
        assert value.dtype == torch_dtype
        assert torch.equal(value.flatten(), masters[f"{parameter}/master"].to(torch_dtype))
    facts = inspect(trained, tmp_path / "hf")
    assert facts["kind"] == "Hugging Face folder" and facts["model"]["dtype"] == name
    assert facts["parameters"] == sum(value.numel() for value in weights.values())
    assert "training_state" not in facts
    dry = trained.run("--dry-run", "--resume", "never", "--out", str(tmp_path / "none")).stdout
    assert f"# model: {facts['parameters']} parameters" in dry


def test_a_fresh_state_begins_as_a_run_that_begins_with_the_weights(trained, tmp_path):
    call(trained, "convert", trained.out, tmp_path / "hf")
    call(
        trained,
        *("convert", tmp_path / "hf", tmp_path / "fresh", "--to", "state"),
        *("--config", trained.config, "--ranks", "2"),
    )
    state = state_of(tmp_path / "fresh/training_state")
    assert all(not v.any() for n, v in state.items() if not n.endswith("/master"))
    facts = inspect(trained, tmp_path / "fresh")["training_state"]
    assert (facts["train_step"], facts["tokens_total"]) == (0, 0)
    curves = []
    for number, extra in enumerate(
        (["--resume", str(tmp_path / "fresh")], ["--model.init_from", str(tmp_path / "hf")])
    ):
        out = tmp_path / f"run{number}"
        result = trained.run(*extra, "--out", str(out))
        assert result.returncode == 0, result.stderr
        curves.append(losses(out))
    assert len(curves[0]) == 3 and curves[0] == curves[1]


def test_companion_files_travel_and_left_over_weights_do_not(trained, checkpoint, tmp_path):
    call(trained, "convert", checkpoint, tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    save_file({"stray": torch.zeros(3)}, tmp_path / "hf/old.safetensors")
    assert inspect(trained, tmp_path / "hf")["unused_files"] == ["old.safetensors"]
    (tmp_path / "hf/complete.json").unlink()
    call(trained, "convert", tmp_path / "hf", tmp_path / "again", "--dtype", "bf16")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"complete.json", "config.json", "model.safetensors", "tokenizer.json"}


def test_a_damaged_state_is_refused_and_nothing_is_left(trained, checkpoint, tmp_path):
    call(trained, "convert", checkpoint, tmp_path / "state", "--ranks", "2")
    victim = tmp_path / "state/training_state/rank-00001-of-00002.safetensors"
    damaged = bytearray(victim.read_bytes())
    damaged[-5] ^= 1
    victim.write_bytes(damaged)
    result = call(trained, "convert", tmp_path / "state", tmp_path / "new", "--ranks", "3", code=2)
    assert_one_sentence(result, victim.name)
    assert {path.name for path in tmp_path.iterdir()} == {"state"}
    victim.unlink()
    result = call(trained, "convert", tmp_path / "state", tmp_path / "new", "--ranks", "3", code=2)
    assert_one_sentence(result, victim.name)
    assert {path.name for path in tmp_path.iterdir()} == {"state"}


def test_a_disk_that_fills_leaves_nothing(trained, checkpoint, tmp_path):
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))

    result = subprocess.run(
        [str(trained.binary), "convert", str(checkpoint), str(tmp_path / "new")],
        env=trained.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=limit,
    )
    assert_one_sentence(result, "File too large", code=1)
    assert list(tmp_path.iterdir()) == []


def test_inspect_says_what_a_run_holds(trained, checkpoint):
    facts = inspect(trained, trained.out)
    assert facts["kind"] == "run" and facts["finished"] and not facts["running"]
    assert facts["steps_done"] == 3
    assert facts["config"]["seq_len"] == 256
    assert facts["last_metrics"]["loss"] == losses(trained.out)[-1]
    assert [c["train_step"] for c in facts["checkpoints"]["complete"]] == [3]
    assert facts["checkpoints"]["ignored"] == []
    whole = inspect(trained, checkpoint)
    assert whole["kind"] == "checkpoint" and whole["complete"]
    assert whole["model"]["num_hidden_layers"] == 2
    assert whole["training_state"]["written_by_ranks"] == 2
    text = call(trained, "inspect", checkpoint).stdout
    assert "num_attention_heads" in text and "q_proj" not in text
    assert (
        "model.layers.1.self_attn.q_proj.weight"
        in call(trained, "inspect", checkpoint, "--tensors").stdout
    )
    assert inspect(trained, checkpoint / "training_state")["train_step"] == 3
    assert inspect(trained, checkpoint.parent)["kind"] == "folder of checkpoints"


def test_inspect_names_an_unfinished_checkpoint_and_a_cut_row(trained, tmp_path):
    (tmp_path / "checkpoints/.incomplete-step-00000009").mkdir(parents=True)
    rows = (trained.out / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(rows[:-20])
    facts = inspect(trained, tmp_path)
    assert facts["steps_done"] == 2 and "cut" in facts["metrics_end"]
    assert not facts["finished"]
    assert len(facts["checkpoints"]["ignored"]) == 1


@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_inspect_says_what_a_token_file_holds(job, suffix):
    prefix = job.folder / "some"
    write_token_file(prefix, [[5, 6, 7], [63], [9, 8]])
    facts = inspect(job, f"{prefix}{suffix}")
    assert facts["kind"] == "token file" and not facts["loss_mask"]
    assert (facts["tokens"], facts["sequences"]) == (6, 3)
    assert (facts["shortest_sequence"], facts["longest_sequence"]) == (1, 3)
    assert (facts["least_id"], facts["greatest_id"], facts["sampled_tokens"]) == (5, 63, 6)
    write_token_file(job.folder / "some_loss_mask", [[1, 0, 1, 1, 0, 1]], dtype="uint8")
    assert inspect(job, f"{prefix}{suffix}")["loss_mask"]
