"""python -m mtraining.generate on a tiny random checkpoint with a tokenizer of bytes."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from mtraining import generate
from python.tests.conftest import assert_one_sentence, run_text, tiny_qwen2

PROMPT = "def add(a, b):\n    return a + b\n\n" * 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(folder)
    return folder


def test_dense_continues_as_transformers_own_attention_does(checkpoint, capsys):
    arguments = ["--checkpoint", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "6"]
    assert generate.main([*arguments, "--attention", "dense"]) == 0
    got = capsys.readouterr().out
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    eager = Qwen2ForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = eager.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + 6
    assert got == tokenizer.decode(out[0, ids.shape[1] :]) + "\n"


def test_each_line_of_a_file_gets_its_output(checkpoint, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in (PROMPT, "x = 1")))
    assert generate.main(["--checkpoint", str(checkpoint), "--input", str(path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == [PROMPT, "x = 1"] and all(row["output"] for row in rows)


def test_mistakes_are_one_line_and_exit_2(checkpoint, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"txt": "b"}\n')
    for arguments, text in (
        (["--checkpoint", str(tmp_path), "--prompt", "a"], "holds no config.json"),
        (
            ["--checkpoint", str(checkpoint), "--input", str(broken)],
            'broken.jsonl:2: "text": expected str, got none',
        ),
        (["--checkpoint", str(checkpoint), "--input", "missing.jsonl"], "missing.jsonl"),
        (["--checkpoint", str(checkpoint), "--prompt", ""], "no tokens"),
        (["--checkpoint", str(checkpoint), "--prompt", "a", "--p-slash", "2"], "p_slash"),
        (["--checkpoint", str(checkpoint), "--prompt", "a", "--max-new-tokens", "0"], "at least 1"),
        (["--checkpoint", str(checkpoint), "--prompt", "a" * 337], "= 336 tokens, got 337"),
        (["--checkpoint", str(checkpoint), "--prompt", "a", "--max-new-tokens", "400"], "= 0 tok"),
    ):
        assert generate.main(arguments) == 2
        captured = capsys.readouterr()
        lines = [
            line for line in captured.err.splitlines() if line.startswith("mtraining: error: ")
        ]
        assert captured.out == "" and len(lines) == 1 and text in lines[0], captured.err


def run_verb(binary, checkpoint, lines, *extra):
    path = checkpoint / "ids.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return run_text([binary, "generate", "--checkpoint", checkpoint, "--input", path, *extra])


def test_the_verb_takes_ids_and_gives_transformers_greedy_ids(binary, checkpoint):
    prompts = [[7], list(range(64)), [(i * i) % 256 for i in range(201)]]
    lines = [json.dumps({"ids": ids}) for ids in prompts]
    result = run_verb(binary, checkpoint, [lines[0], "", *lines[1:]], "--max-new-tokens", "6")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    eager = Qwen2ForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    for ids, row in zip(prompts, rows, strict=True):
        out = eager.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert row == {"ids": ids, "output": out[0, len(ids) :].tolist()}
    stop = str(rows[1]["output"][0])
    sparse = ["--attention", "vertical_slash", "--set", "attention.p_slash=0.5", "--stop-id", stop]
    result = run_verb(binary, checkpoint, lines[1:], "--max-new-tokens", "3", *sparse)
    assert result.returncode == 0, result.stderr
    assert all(1 <= len(json.loads(line)["output"]) <= 3 for line in result.stdout.splitlines())


@pytest.mark.parametrize(
    ("line", "extra", "parts"),
    [
        ('{"ids": [1, 256]}', [], ["ids.jsonl:2", '"ids"[1]', "0 to 255", "256"]),
        ('{"ids": []}', [], ["ids.jsonl:2", "an array of token ids"]),
        ('{"text": "a"}', [], ["ids.jsonl:2", '"ids"']),
        ('{"ids": [1.5]}', [], ["ids.jsonl:2", "1.5"]),
        ("[1, 2", [], ["ids.jsonl:2"]),
        (json.dumps({"ids": [1] * 337}), [], ["= 336 ids", "337"]),
        ('{"ids": [1]}', ["--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
        ('{"ids": [1]}', ["--max-new-tokens", "400"], ["max_position_embeddings"]),
        ('{"ids": [1]}', ["--attention", "no"], ["attention.pattern"]),
        ('{"ids": [1]}', ["--set", "train.device=cuda"], ["train.device"]),
        ('{"ids": [1]}', ["--beams", "2"], ["unknown option --beams"]),
    ],
)
def test_the_verbs_mistakes_are_one_sentence(binary, checkpoint, line, extra, parts):
    result = run_verb(binary, checkpoint, ['{"ids": [3]}', line], *extra)
    assert_one_sentence(result, *parts)
    assert result.stdout == ""
