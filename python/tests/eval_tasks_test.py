"""mtraining eval needle|ruler|infinitebench: a model made by hand that retrieves through attention alone, and random weights against
transformers."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM

from mtraining import tasks
from python.tests.conftest import (
    assert_one_sentence,
    clean_environment,
    rows_of,
    run_text,
    tiny_qwen2,
)

SPARSE = ["attention.fixed_columns=0", "attention.fixed_diagonals=0", "attention.local_blocks=1"]
SPARSE += ["attention.sink_tokens=64", "attention.dense_threshold=1"]
SPARSE += ["attention.p_vertical=0.2", "attention.p_slash=0.2"]
FILLER, QUESTION, FIRST_NEEDLE, NEEDLES = 16, 16, 17, 15


def retriever(folder):
    """One layer whose query at the question scores needles alone, whatever their distance: dimension 31 of 32 turns by 1.5e-6 a token.

    Ids below 16 are filler, 16 is the question, 17 .. 31 are needles; what follows the question is the needle that was seen.
    """
    head, values = 64, 32
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head}
    config = LlamaConfig(
        vocab_size=values,
        max_position_embeddings=8192,
        rope_theta=1e6,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        **sizes,
        **heads,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        layer = model.model.layers[0]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1)
        embed, attention = model.model.embed_tokens.weight, layer.self_attn
        embed[:, 2 : 2 + values] = torch.eye(values)
        embed[FIRST_NEEDLE:, 0] = 1
        embed[QUESTION, 1] = 1
        attention.k_proj.weight[31, 0] = 4
        attention.q_proj.weight[31, 1] = 4
        attention.v_proj.weight[:values, 2 : 2 + values] = torch.eye(values)
        attention.o_proj.weight[2 + values : 2 + 2 * values, :values] = 100 * torch.eye(values)
        model.lm_head.weight[:, 2 + values : 2 + 2 * values] = torch.eye(values)
        model.lm_head.weight[:FIRST_NEEDLE] *= (
            0.01  # a question that finds nothing says no filler's id loudly
        )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return retriever(tmp_path_factory.mktemp("retriever"))


def grid(path, lengths=(300, 900), depths=(0.0, 0.5, 1.0)):
    rows = []
    for length in lengths:
        for depth in depths:
            ids = np.random.default_rng(length).integers(0, FILLER, length - 1)
            # At 0 and 1: among the sinks and in the question's own block.
            at = {0.0: 3, 1.0: length - 3}.get(depth, int(depth * length))
            needle = FIRST_NEEDLE + len(rows) % NEEDLES
            ids[at] = needle
            ids[-1] = QUESTION
            rows.append(
                {"id": f"{length}/{depth}", "task": "needle", "length": length, "depth": depth}
                | {"ids": ids.tolist(), "max_new_tokens": 1, "answers": [[needle]], "stops": [0]}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def run(binary, kind, checkpoint, data, *extra):
    command = [str(binary), "eval", kind, "--checkpoint", str(checkpoint), "--data", str(data)]
    command += [*map(str, extra), "--set", "train.device=cpu"]
    return run_text(command, env=clean_environment())


def test_the_retriever_finds_needles_where_its_pattern_looks_and_nowhere_else(
    binary, weights, tmp_path
):
    data = tmp_path / "n.jsonl"
    samples = grid(data)
    sets = [word for key in SPARSE for word in ("--set", key)]
    arms = ["dense", "vertical_slash", "fixed"]
    got = rows_of(run(binary, "needle", weights, data, "--attention", *arms, *sets))
    by_arm = {arm: [r for r in got if r["attention"] == arm] for arm in arms}
    for arm, rows in by_arm.items():
        answers = [row for row in rows if "id" in row]
        assert [row["id"] for row in answers] == [s["id"] for s in samples]
        for row, given in zip(answers, samples, strict=True):
            found = arm != "fixed" or given["depth"] != 0.5
            assert (row["output"] == given["answers"][0]) == found, (arm, row)
            assert row["score"] == found and row["prompt_tokens"] == len(given["ids"])
            blocks = -(-len(given["ids"]) // 64)  # counted whole
            every_pair = blocks * (blocks + 1) / 2 * 64 * 64 / (len(given["ids"]) ** 2 / 2)
            if arm == "dense":
                assert row["density"] == pytest.approx(every_pair)
            else:
                assert row["density"] < 0.9 * every_pair
        cells = {
            (r["length"], r["depth"]): r["score"]
            for r in rows
            if r.get("by") == "task,length,depth"
        }
        assert cells == {
            (s["length"], s["depth"]): float(arm != "fixed" or s["depth"] != 0.5) for s in samples
        }
        (all_row,) = (r for r in rows if r.get("by") == "all")
        assert all_row["score"] == pytest.approx(1 if arm != "fixed" else 2 / 3)
        assert (all_row["samples"], all_row["dtype"], all_row["device"]) == (6, "float32", "cpu")
    assert len({row["run"] for row in got if "by" not in row}) == 3


def test_a_run_that_was_stopped_goes_on_and_one_of_other_weights_is_refused(
    binary, weights, tmp_path
):
    data, out = tmp_path / "n.jsonl", tmp_path / "out.jsonl"
    grid(data)
    dense = ["--attention", "dense"]
    whole = rows_of(run(binary, "needle", weights, data, *dense, "--out", out))
    assert all("by" in row for row in whole)
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 7 and json.loads(lines[0])["attention"] == "dense"
    marked = [lines[0], lines[1].replace('"score":1.0', '"score":0.25')]  # kept, not made again
    assert marked[1] != lines[1]
    out.write_text("".join(marked) + lines[2][:40])
    result = run(binary, "needle", weights, data, *dense, "--out", out)
    again = rows_of(result)
    assert "cut off the 40 bytes" in result.stderr
    assert again[-1]["score"] == pytest.approx((0.25 + 5) / 6)
    ids = [json.loads(line).get("id") for line in out.read_text().splitlines()]
    assert ids == [json.loads(line).get("id") for line in lines]
    before = out.read_text()
    other = ["--set", "model.rope_theta=2000000.0"]
    assert_one_sentence(
        run(binary, "needle", weights, data, *dense, *other, "--out", out),
        "out.jsonl:2",
        "other weights or settings",
    )
    grid(data, lengths=(301, 900))
    text = data.read_text().replace("301/", "300/")
    data.write_text(text)
    assert_one_sentence(
        run(binary, "needle", weights, data, *dense, "--out", out), "out.jsonl:2", "another sample"
    )
    assert out.read_text() == before


def test_shards_add_up(binary, weights, tmp_path):
    data = tmp_path / "n.jsonl"
    samples = grid(data, lengths=(100, 200, 300))
    found = []
    for shard in ("1/2", "2/2"):
        rows = rows_of(
            run(binary, "needle", weights, data, "--attention", "dense", "--shard", shard)
        )
        found.append([row["id"] for row in rows if "id" in row])
    assert found == [[s["id"] for s in samples[i::2]] for i in (0, 1)]
    rows = rows_of(run(binary, "needle", weights, data, "--attention", "dense", "--max-samples", 2))
    assert [row["id"] for row in rows if "id" in row] == [s["id"] for s in samples[:2]]
    limit = ["--max-samples", 1, "--max-tokens"]
    assert_one_sentence(
        run(binary, "needle", weights, data, *limit, 298), "n.jsonl:7", "at most 298"
    )
    assert rows_of(run(binary, "needle", weights, data, *limit, 300))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    torch.manual_seed(3)
    config = tiny_qwen2(max_position_embeddings=4096, initializer_range=0.3)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_answers_and_likelihoods_are_transformers(binary, random_weights, tmp_path, capsys):
    """From text to scores of text: files of the makers, greedy ids and letters' likelihoods of the same weights in transformers."""
    model = Qwen2ForCausalLM.from_pretrained(random_weights, attn_implementation="eager")
    book = "".join(f"On day {i} it was {'wet' if i % 3 else 'dry'}. " for i in range(200))
    (tmp_path / "book.txt").write_text(book)
    (tmp_path / "longbook_choice_eng.jsonl").write_text(
        json.dumps(
            {
                "context": book,
                "input": "How was day 3?",
                "answer": ["dry"],
                "options": ["dry", "wet"],
            }
        )
        + "\n"
    )
    base = ["--tokenizer", "bytes", "--max-new-tokens", "7", "--out"]
    ruler, choice = tmp_path / "r.jsonl", tmp_path / "c.jsonl"
    made = ["--haystack", str(tmp_path / "book.txt"), "--lengths", "1500", "--samples", "1"]
    assert tasks.main(["ruler", *base, str(ruler), *made, "--tasks", "niah_single_2", "vt"]) == 0
    made = ["--folder", str(tmp_path), "--length", "600", "--likelihood"]
    assert tasks.main(["infinitebench", *base, str(choice), *made]) == 0
    samples = [json.loads(line) for line in ruler.read_text().splitlines()]
    greedy = {}
    for sample in samples:
        ids = torch.tensor([sample["ids"]])
        out = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0)
        greedy[sample["id"]] = out[0, ids.shape[1] :].tolist()
    # The first sample asks for what this model is known to say, and for something else.
    first = samples[0]
    said = greedy[first["id"]]
    other = next(i for i in range(256) if i not in said)
    first["answers"] = [said[2:5], [other]]
    ruler.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    out = tmp_path / "r.out"
    got = rows_of(run(binary, "ruler", random_weights, ruler, "--attention", "dense", "--out", out))
    rows = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert {row["id"]: row["output"] for row in rows} == greedy
    assert rows[0]["score"] == 0.5
    scores = {row["by"]: row["score"] for row in got if row.get("task") is None}
    assert scores["all"] == pytest.approx((0.5 + rows[1]["score"]) / 2) == scores["length"]

    capsys.readouterr()
    command = ["score", "--tokenizer", "bytes", "--data", str(ruler), "--results", str(out)]
    assert tasks.main([*command, "--out", str(tmp_path / "s.jsonl")]) == 0
    facts, *means = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (
        facts["run"] == rows[0]["run"]
        and facts["weights"]
        and "model.vocab_size" in facts["settings"]
    )
    assert {row["by"] for row in means} == {"task,length", "task", "length", "all"}
    texts = [json.loads(line)["output"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert texts == [bytes(row["output"]).decode(errors="replace") for row in rows]

    (sample,) = (json.loads(line) for line in choice.read_text().splitlines())
    rows = rows_of(run(binary, "infinitebench", random_weights, choice, "--attention", "dense"))
    (row,) = (row for row in rows if "id" in row)
    for option, value in zip(sample["options"], row["log_likelihoods"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sample["ids"] + option])).logits[0].double()
        sure = logits.log_softmax(-1)[len(sample["ids"]) - 1 :]
        want = sum(sure[i, token].item() for i, token in enumerate(option))
        assert value == pytest.approx(want, abs=2e-4)
    assert row["choice"] == int(np.argmax(row["log_likelihoods"]))
    assert row["score"] == float(row["choice"] in sample["correct"])
    assert (
        len(sample["options"]) == 2
        and sample["truncated_tokens"] > 0
        and rows[-1]["truncated"] == 1
    )


GOOD = {"id": "a", "task": "needle", "ids": [1], "max_new_tokens": 1, "answers": [[2]]}


@pytest.mark.parametrize(
    ("kind", "line", "extra", "parts"),
    [
        ("needle", "{", [], ["n.jsonl:2", "not valid JSON"]),
        ("needle", json.dumps(GOOD), [], ["n.jsonl:2", "line 1's already"]),
        (
            "needle",
            json.dumps(GOOD | {"id": "b", "ids": [32]}),
            [],
            ["n.jsonl:2", '"ids"[0]', "0 to 31"],
        ),
        (
            "needle",
            json.dumps(GOOD | {"id": "b", "ids": [1] * 8192}),
            [],
            ["n.jsonl:2", "8192 ids and 1 new", "max_position_embeddings"],
        ),
        ("ruler", "", [], ["n.jsonl:1", '"task"', "niah_single", "for ruler"]),
        ("needle", "", ["--attention", "sparse"], ["attention.pattern", "sparse"]),
        ("needle", "", ["--attention", "dense", "dense"], ["--attention", "twice"]),
        ("needle", "", ["--attention", "fixed"], ["attention.pattern", "fixed_columns"]),
        ("needle", "", ["--shard", "3/2"], ["--shard", "3/2"]),
        ("needle", "", ["--shard", "2/2"], ["--shard", "has none"]),
        ("needle", "", ["--shard", "x"], ["--shard", "I/N"]),
        ("needle", "", ["--max-samples", "0"], ["--max-samples", "at least 1"]),
        ("needle", "", ["--out", "/absent/x"], ["/absent/x", "cannot be written"]),
        ("needle", "", ["--threads", "0"], ["--threads"]),
        ("needle", "", ["--beams", "2"], ["eval needle", "unknown option --beams"]),
    ],
)
def test_mistakes_are_one_sentence_before_weights_are_read(
    binary, weights, tmp_path, kind, line, extra, parts
):
    data, folder = tmp_path / "n.jsonl", tmp_path / "weights"
    data.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    folder.mkdir()
    (folder / "config.json").write_text((weights / "config.json").read_text())
    whole = (weights / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little") + 8
    (folder / "model.safetensors").write_bytes(
        whole[:size] + bytes(len(whole) - size)
    )  # zeros: not this model
    result = run(binary, kind, folder, data, *extra)
    assert_one_sentence(result, *parts)
    assert result.stdout == ""


def test_help_has_examples_and_absent_files_are_named(binary, weights, tmp_path):
    for words in (["eval", "--help"], ["eval", "ruler", "--help"]):
        result = run_text([binary, *words])
        assert result.returncode == 0 and "mtraining eval" in result.stdout.lower()
        assert "xamples" in result.stdout
    assert_one_sentence(run(binary, "needle", weights, tmp_path / "no"), "no: cannot be opened")
    assert_one_sentence(
        run(binary, "needle", tmp_path / "no", tmp_path / "no"), "expected a folder"
    )
    (tmp_path / "n.jsonl").write_text(json.dumps(GOOD) + "\n")
    data = tmp_path / "n.jsonl"
    assert_one_sentence(
        run(binary, "needle", weights, data, "--out", data), "--out", "--data itself"
    )
