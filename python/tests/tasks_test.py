"""python -m mtraining.tasks: files of needle, RULER and InfiniteBench samples, and scores of text by their tests' rules."""

import json
import re
from collections import Counter

import pytest
from mtraining.task_samples import Tokens, fit

from mtraining import needle, plots, ruler, task_scores, tasks

WORDS = "stone river lamp garden winter copper letter window bridge meadow".split()
TEXT = "".join(
    f"The {WORDS[i % 10]} of day {i} was {WORDS[(i * i + 3) % 10]}, and {WORDS[(3 * i) % 10]} followed. "
    for i in range(4000)
)


@pytest.fixture
def haystack(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT)
    return path


def make(out, *arguments) -> list[dict]:
    assert tasks.main([*map(str, arguments), "--out", str(out), "--tokenizer", "bytes"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def text_of(row) -> str:
    return bytes(row["ids"]).decode()


def refusal(capsys, *arguments) -> str:
    try:
        code = tasks.main([*map(str, arguments)])
    except SystemExit as end:  # argparse
        code = end.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "", captured
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("mtraining: error: "), captured.err
    return lines[0]


@pytest.mark.parametrize("rate", [1, 0.3, 7])
def test_the_most_filler_that_fits_is_found(rate):
    for most in (0, 1, 5, 10_000):
        for room in (20, 21, 100, 5000, 200_000):
            for first in (1, 50, 10**6):
                n = fit(lambda n: 20 + int(rate * n), most, room, first)
                assert 20 + int(rate * n) <= room
                at = 20 + int(rate * n)
                best = n == most or 20 + int(rate * (n + 1)) > room
                assert best or at >= room - room // 200, (most, room, n)
    with pytest.raises(ValueError, match="20 tokens without any filler, expected at most 19"):
        fit(lambda n: 20 + n, 10, 19, 1)


def test_needles_stand_at_their_depth_in_samples_of_their_length(tmp_path, haystack, capsys):
    grid = ["--lengths", 700, 2048, 20000, "--depths", 0, 0.1, 0.5, 0.93, 1, "--samples", 2]
    rows = make(tmp_path / "n.jsonl", "needle", "--haystack", haystack, *grid)
    said = json.loads(capsys.readouterr().out)
    assert said["samples"] == len(rows) == 30 and said["truncated"] == 0
    assert len({row["id"] for row in rows}) == 30
    for row in rows:
        length, depth = row["length"], row["depth"]
        total = len(row["ids"]) + row["max_new_tokens"]
        assert 0.99 * length <= total <= length
        (number,) = row["text"]["answers"]
        text = text_of(row)
        assert text.count(number) == 1 and text.endswith("Answer:")
        hay = text.split("\n\n")[1]
        sentence = re.search(rf"The locker [^.]*{number}\. ?", hay)
        rest = hay.replace(sentence.group(), "")
        at = sentence.start() / len(rest)
        assert depth - 0.05 <= at <= depth if 0 < depth < 1 else round(at) == depth, (depth, at)
        assert TEXT.startswith(rest.rstrip())
        if 0 < depth < 1 and ". " in rest[: round(depth * len(rest))][-len(rest) // 20 :]:
            before = rest[: sentence.start()]
            assert (
                before.endswith(". ")
                and ". " not in rest[len(before) : round(depth * len(rest)) - 2]
            )
        assert list(number.encode()) in row["answers"][0]
    assert len({row["text"]["answers"][0] for row in rows}) == 30
    again = make(tmp_path / "m.jsonl", "needle", "--haystack", haystack, *grid)
    other = make(tmp_path / "o.jsonl", "needle", "--haystack", haystack, *grid, "--seed", 1)
    assert again == rows and all(a["ids"] != b["ids"] for a, b in zip(rows, other, strict=True))


def test_a_haystack_that_is_too_short_is_refused_or_repeated_when_asked(tmp_path, haystack, capsys):
    haystack.write_text(TEXT[:2000])
    base = ["needle", "--haystack", haystack, "--lengths", 32768, "--depths", 0.5]
    said = refusal(capsys, *base, "--tokenizer", "bytes", "--out", tmp_path / "x.jsonl")
    assert "length 32768: the haystack is used up at 22" in said and "at most 3 percent" in said
    assert not (tmp_path / "x.jsonl").exists() and not (tmp_path / "x.jsonl.part").exists()
    (row,) = make(tmp_path / "x.jsonl", *base, "--repeat-haystack")
    assert 0.99 * 32768 <= len(row["ids"]) + 16 <= 32768
    own = ["--needle", "Mind the gap.", "--question", "Mind what?", "--answer", "the", "gap"]
    (row,) = make(tmp_path / "x.jsonl", *base, "--repeat-haystack", *own)
    assert text_of(row).count("Mind the gap.") == 1 and row["text"]["answers"] == ["the", "gap"]


def test_mistakes_are_one_sentence(tmp_path, haystack, capsys):
    out = ["--out", tmp_path / "x.jsonl"]
    base = ["needle", *out, "--tokenizer", "bytes", "--lengths", 2048]
    with_text = [*base, "--haystack", haystack]
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "two.txt").write_text("left right")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')
    row = {"question": "Who?", "answers": ["x"], "documents": ["y"]}
    for name, wrong in (("number", {"answers": [7]}), ("none", {"documents": []})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | wrong))
    ask = ["ruler", *base[1:], "--tasks", "qa", "--questions"]
    for arguments, says in (
        (base, "--haystack"),
        ([*with_text, "--depths", 2], "--depths"),
        ([*with_text, "--lengths", 100], "length 100 with 16 new tokens: a prompt has"),
        ([*with_text, "--lengths", 600, 600], "--lengths: 600 is given twice"),
        ([*with_text, "--lengths", 0], "above 0"),
        ([*with_text, "--needle", "x"], "all three or none"),
        ([*with_text, "--chat"], "no chat template"),
        ([*base, "--haystack", tmp_path / "absent"], "absent"),
        ([*base, "--haystack", tmp_path / "empty.txt"], "expected text, got none"),
        ([*with_text, "--tokenizer", tmp_path / "no"], "--tokenizer"),
        (["ruler", *base[1:], "--tasks", "niah_single_2"], "niah_single_2: expected --haystack"),
        (["ruler", *base[1:], "--tasks", "qa"], "qa: expected --questions"),
        ([*ask, tmp_path / "latin.jsonl"], "latin.jsonl:1: expected UTF-8 text"),
        ([*ask, tmp_path / "number.jsonl"], 'number.jsonl:2: "answers": expected texts, got [7]'),
        ([*ask, tmp_path / "none.jsonl"], 'none.jsonl:2: "documents": expected texts, got []'),
        (["ruler", *base[1:], "--tasks", "vtt"], "'vtt'"),
        *(
            (
                ["ruler", *with_text[1:], "--tasks", task, "--words", tmp_path / "two.txt"],
                "--words: expected at least 20 words, got 2",
            )
            for task in ("niah_multikey_1", "niah_multikey_2", "cwe")
        ),
        (["ruler", *base[1:], "--tasks", "cwe", "--lengths", 600], "cwe: length 600"),
        (["nedle"], "nedle"),
        ([], "required"),
    ):
        assert says in refusal(capsys, *arguments), says


def test_every_task_of_ruler_holds_what_it_asks_for(tmp_path, haystack):
    questions = tmp_path / "qa.jsonl"
    asked = [
        {
            "question": f"Who lives at {i}?",
            "answers": [f"Owner{i}"],
            "documents": [f"At {i}: Owner{i}. {TEXT[i * 60 : i * 60 + 60]}"],
        }
        for i in range(200)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked))
    grid = ["--lengths", 8192, "--samples", 2, "--haystack", haystack, "--questions", questions]
    rows = make(tmp_path / "r.jsonl", "ruler", *grid)
    assert Counter(row["task"] for row in rows) == dict.fromkeys(ruler.TASKS, 2)
    for row in rows:
        total = len(row["ids"]) + row["max_new_tokens"]
        assert 0.97 * 8192 <= total <= 8192, row["id"]
        text, answers = text_of(row), row["text"]["answers"]
        task = row["task"]
        if task in ruler.RETRIEVAL:
            what = ruler.RETRIEVAL[task]
            pairs = re.findall(r"One of the secret \w+ of (\S+) is ([\w-]+)\.", text)
            keys = re.search(r"What are all the secret \w+ of (.*) that", text).group(1).split(", ")
            assert len(keys) == what.queries
            assert sorted(v for k, v in pairs if k in keys) == sorted(answers)
            assert len(answers) == what.queries * what.values
            expected = what.keys * what.values
            assert len(pairs) == expected if what.haystack != "needles" else len(pairs) > 50
            own = "uuid" if what.value == "uuid" else "number"
            assert all(len(v) == (36 if own == "uuid" else 7) for _, v in pairs)
        elif task == "vt":
            value, names = (
                re.search(r"value (\d+) in the text", text.rsplit("Which", 1)[1]).group(1),
                set(),
            )
            for name, to in re.findall(r"VAR (\w+) = (\d+|VAR \w+)\.", text):
                if to == value or to.removeprefix("VAR ") in names:
                    names.add(name)
            assert names == set(answers) and len(names) == 5
        elif task == "cwe":
            listed = Counter(re.findall(r"\d+\. (\w+)", text.rsplit("The numbered list", 1)[1]))
            assert {w for w, n in listed.most_common(10)} == set(answers)
            assert sorted(set(listed.values())) == [3, 30]
        elif task == "fwe":
            words = Counter(re.findall(r"\b[a-z]{6}\b", text.split("\n")[1]))
            (a, b, c, d) = words.most_common(4)
            assert [a[0], b[0], c[0]] == answers and a[1] > b[1] > c[1] > d[1]
            assert text.count("....") > a[1]
        else:
            number = re.search(r"Who lives at (\d+)\?", text).group(1)
            assert answers == [f"Owner{number}"] and f"At {number}: Owner{number}." in text
            assert row["match"] == "any" and text.count("Document ") > 10
    assert make(tmp_path / "s.jsonl", "ruler", *grid) == rows


def test_words_of_the_users_own(tmp_path):
    words = [f"word{i:04}" for i in range(700)]
    (tmp_path / "words.txt").write_text("\n".join(words))
    rows = make(
        tmp_path / "r.jsonl",
        "ruler",
        "--lengths",
        8192,
        "--samples",
        1,
        "--tasks",
        "cwe",
        "niah_single_1",
        "--words",
        tmp_path / "words.txt",
    )
    assert set(rows[0]["text"]["answers"]) <= set(words)
    assert re.search(r"secret numbers of (word\d+-word\d+) is", text_of(rows[1]))


def test_no_needle_of_the_haystack_has_a_key_that_is_asked_for(tmp_path):
    (tmp_path / "words.txt").write_text(" ".join(f"w{i:02}" for i in range(20)))  # 380 keys
    grid = ["--lengths", 16384, "--samples", 8, "--tasks", "niah_multikey_2"]
    rows = make(tmp_path / "r.jsonl", "ruler", *grid, "--words", tmp_path / "words.txt")
    for row in rows:
        text = text_of(row)
        key = re.search(r"What are all the secret \w+ of (.*) that", text).group(1)
        (value,) = re.findall(rf"of {key} is (\d+)\.", text)
        assert row["text"]["answers"] == [value]


BOOK = " ".join(f"Chapter {i}." for i in range(900))
ROWS = {
    "passkey": {
        "context": f"{BOOK} The pass key is 71432. {BOOK}",
        "input": "What is the pass key?",
        "answer": ["71432"],
    },
    "kv_retrieval": {"context": '{"a": "b-1"}', "input": "Value of a?", "answer": "b-1"},
    "longbook_choice_eng": {
        "context": BOOK,
        "input": "Which?",
        "answer": ["two"],
        "options": ["one", "two", "three", "four"],
    },
    "longbook_qa_eng": {"context": BOOK, "input": "Who?", "answer": ["Ann", "Anna"]},
    "longbook_sum_eng": {"context": BOOK, "answer": ["A tale."]},
    "code_debug": {
        "context": "def f(): ...",
        "input": "Which?",
        "answer": ["g"],
        "options": ["f", "g", "h", "i"],
    },
    "code_run": {"context": "def f(): ...", "input": "f(1)?", "answer": [-4], "options": None},
    "math_find": {"context": "[1, 2]", "input": "The largest number?", "answer": [2]},
    "math_calc": {"context": "1 + 2 - 3", "input": "", "answer": [3, 0]},
}


@pytest.fixture
def infinitebench(tmp_path):
    for task, row in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({"id": 7} | row) + "\n")
    return ["infinitebench", "--folder", tmp_path]


def test_infinitebench_loses_the_middle_of_a_context_never_the_question(tmp_path, infinitebench):
    short = ["--max-new-tokens", 20]
    rows = make(tmp_path / "i.out", *infinitebench, "--length", 3000, *short)
    assert [row["task"] for row in rows] == [t for t in tasks.infinitebench.TASKS if t in ROWS]
    for row in rows:
        given, text = ROWS[row["task"]], text_of(row)
        question = given.get("input", "").strip()
        assert question in text and row["id"] == f"{row['task']}/7"
        lost = row.get("truncated_tokens", 0)
        assert (lost > 0) == (len(given["context"]) > 2800)
        if lost:
            assert 2960 <= len(row["ids"]) <= 2980
            assert given["context"][:1000] in text and given["context"][-1000:] in text
            whole = make(
                tmp_path / "w.out",
                *infinitebench,
                "--length",
                10**5,
                *short,
                "--tasks",
                row["task"],
            )
            assert lost == len(whole[0]["ids"]) - len(row["ids"])
            assert "truncated_tokens" not in whole[0] and given["context"] in text_of(whole[0])
        else:
            assert given["context"] in text
    by_task = {row["task"]: row for row in rows}
    assert by_task["code_debug"]["text"]["letter"] == "B" and "\nB. g" in text_of(
        by_task["code_debug"]
    )
    assert list(b"-4") in by_task["code_run"]["answers"][0]
    assert by_task["longbook_sum_eng"]["answers"] == by_task["math_calc"]["answers"] == []
    assert len(by_task["longbook_qa_eng"]["answers"]) == 2


def test_infinitebench_choices_by_likelihood_and_numbers_of_new_tokens(tmp_path, infinitebench):
    base = [
        *infinitebench,
        "--tasks",
        "longbook_choice_eng",
        "code_debug",
        "passkey",
        "--length",
        50000,
    ]
    rows = make(tmp_path / "i.out", *base, "--likelihood")
    for row in rows[:2]:
        assert row["options"] == [list(f" {c}".encode()) for c in "ABCD"] and row["correct"] == [1]
        assert not {"answers", "match", "max_new_tokens", "stops"} & set(row)
    assert rows[2]["max_new_tokens"] == 6


def test_infinitebench_mistakes_name_file_and_line(tmp_path, infinitebench, capsys):
    path = tmp_path / "passkey.jsonl"
    base = [
        *infinitebench,
        "--out",
        tmp_path / "i.out",
        "--tokenizer",
        "bytes",
        "--length",
        3000,
        "--tasks",
    ]
    good = json.dumps(ROWS["passkey"])
    for line, says in (
        ("{", "passkey.jsonl:2: not valid JSON"),
        ("[]", "passkey.jsonl:2: expected a JSON object"),
        ("{}", '"context": expected str, got none'),
        ('{"context": 1, "answer": 1}', '"context": expected str, got int'),
        ('{"context": "", "input": "", "answer": []}', 'passkey.jsonl:2: "answer": expected one'),
        ('{"context": "", "input": "", "answer": [1]}', "expected texts"),
        (
            json.dumps({"context": "", "input": "q" * 3000, "answer": "1"}),
            "passkey.jsonl:2: the question",
        ),
    ):
        path.write_text(f"{good}\n{line}\n")
        assert says in refusal(capsys, *base, "passkey"), line
    (tmp_path / "code_debug.jsonl").write_text(json.dumps(ROWS["code_debug"] | {"answer": ["z"]}))
    assert 'code_debug.jsonl:1: "answer": expected one of "options"' in refusal(
        capsys, *base, "code_debug"
    )
    assert "number_string.jsonl" in refusal(capsys, *base, "number_string")
    assert "math_calc.jsonl:1" in refusal(capsys, *base, "math_calc")  # 30000 new tokens


SCORES = [
    ("contains_all", "Numbers: 12 and 34.", ["12", "35"], {}, 0.5),
    ("contains_all", "ABC def", ["abc", "DEF"], {}, 1),
    ("contains_any", "it is Paris", ["Rome", "paris"], {}, 1),
    ("contains_any", "it is Oslo", ["Rome", "paris"], {}, 0),
    ("passkey", "The key is 123. Not 124", ["123"], {}, 1),
    ("passkey", "12 123", ["123"], {}, 0),
    ("passkey", "none", ["123"], {}, 0),
    ("number_string", "0012", ["0012"], {}, 1),
    ("kv_retrieval", 'is "a-b".', ["a-b"], {}, 1),
    ("kv_retrieval", "is xa-b", ["a-b"], {}, 0),
    ("longdialogue_qa_eng", "I think ROBERT!", ["Robert", "BOB"], {}, 1),
    ("longdialogue_qa_eng", "Roberta", ["ROBERT"], {}, 0),
    ("code_run", "It returns\n-37.", [-37], {}, 1),
    ("code_run", "37 or so", [37], {}, 0),
    ("code_run", "", [37], {}, 0),
    ("math_find", "the number 41.0, not 3", [41], {}, 1),
    ("math_find", "2.5", [2.5], {}, 1),
    ("math_find", "x", [2.5], {}, 0),
    ("math_find", "9" * 400, [2], {}, 0),
    ("math_calc", "[3, 0, 5]", [3, 0, 4, 5], {}, 0.5),
    ("math_calc", "0, 3", [3, 0], {}, 0),
    ("longbook_choice_eng", "B. two", ["two"], {"letter": "B"}, 1),
    ("longbook_choice_eng", "A", ["two"], {"letter": "B"}, 0),
    ("longbook_choice_eng", "the answer is: B", ["two"], {"letter": "B"}, 1),
    ("longbook_choice_eng", "maybe (see) C or B", ["two"], {"letter": "B"}, 0),
    ("longbook_choice_eng", "", ["two"], {"letter": "B"}, 0),
    ("code_debug", "B. g", ["g"], {"letter": "B"}, 1),
    ("code_debug", "the answer is: g", ["g"], {"letter": "B"}, 1),
    ("code_debug", "Because", ["g"], {"letter": "B"}, 0),
    ("longbook_qa_eng", "The red house", ["a red house on it", "blue"], {}, 2 * 2 / (2 + 4)),
    ("longbook_qa_eng", "the", ["the"], {}, 0),
    ("longbook_qa_chn", "红色的房子。", ["红房子"], {}, 2 * 3 / (5 + 3)),
    # One line: words in order. 4 of 5 and 4 of 6.
    ("longbook_sum_eng", "the cat sat here today", ["the cat sat on a today"], {}, 2 * 4 / 11),
    # Lines: the union of what both lines of the text have in common with the reference's line (1 2 and 1 4 of 1 2 3 4 5: 1 2 4).
    ("longbook_sum_eng", "w1 w2 w6 w7\nw1 w8 w4 w9", ["w1 w2 w3 w4 w5"], {}, 2 * 3 / 13),
    ("longbook_sum_eng", "b a", ["a b"], {}, 0.5),
    ("longbook_sum_eng", "a", ["a\na"], {}, 2 * 1 / 3),
    ("longbook_sum_eng", "", ["a"], {}, 0),
]


@pytest.mark.parametrize(("metric", "text", "answers", "facts", "want"), SCORES)
def test_scores_follow_their_tests_rules(metric, text, answers, facts, want):
    assert task_scores.METRICS[metric](text, answers, facts) == pytest.approx(want)


def test_every_task_has_its_rule():
    assert set(tasks.infinitebench.TASKS) <= set(task_scores.METRICS)


def results(path, rows, run="r1", attention="dense", weights="w"):
    facts = {
        "run": run,
        "attention": attention,
        "weights": weights,
        "dtype": "float32",
        "device": "cpu",
    }
    made = [facts]
    for row, output in rows:
        keys = {key: row.get(key) for key in ("id", "task", "length", "depth")}
        made.append(
            keys
            | {"attention": attention, "run": run, "prompt_tokens": len(row["ids"])}
            | {"truncated_tokens": 0, "output": output, "score": 0}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def test_score_reads_text_and_draws(tmp_path, haystack, capsys):
    grid = ["--lengths", 700, 1400, "--depths", 0, 1]
    rows = make(tmp_path / "n.jsonl", "needle", "--haystack", haystack, *grid)
    right = [(row, list(f" It is {row['text']['answers'][0]}.".encode())) for row in rows]
    wrong = [(row, out if row["depth"] == 1 else [65]) for row, out in right]
    paths = [
        results(tmp_path / "a", right),
        results(tmp_path / "b", wrong, "r2", "vertical_slash"),
    ]
    capsys.readouterr()
    command = ["score", "--tokenizer", "bytes", "--data", tmp_path / "n.jsonl", "--results"]
    files = ["--out", tmp_path / "s.jsonl", "--png", tmp_path / "n.png"]
    assert tasks.main([*map(str, [*command, *paths, *files])]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    means = {
        (r["attention"], r["by"], r.get("length"), r.get("depth")): r["score"]
        for r in printed
        if "by" in r
    }
    assert means["dense", "all", None, None] == 1
    assert means["vertical_slash", "all", None, None] == 0.5
    assert means["vertical_slash", "task,length,depth", 700, 0] == 0
    assert means["vertical_slash", "task,length,depth", 1400, 1] == 1
    assert means["vertical_slash", "length", 1400, None] == 0.5
    assert (tmp_path / "n.png").read_bytes()[:4] == b"\x89PNG"
    texts = [json.loads(line)["output"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert texts[0] == bytes(right[0][1]).decode()
    cells = plots.cells_of(
        [r for r in printed if r.get("by") == "task,length,depth" and r["attention"] != "dense"],
        [700, 1400],
        [0, 1],
    )
    assert cells.tolist() == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="length and depth"):
        plots.plot_needle([r for r in printed if r.get("by") == "all"], tmp_path / "x.png")
    for changed, says in (
        ((wrong[1:], "r2", "vertical_slash"), "different samples"),
        ((wrong, "r2", "vertical_slash", "v"), "different weights"),
        ((wrong, "r2"), "is there twice"),
        (([({**rows[0], "id": "x"}, [])], "r2"), "'x' is in none of"),
        (([({**rows[0], "ids": [1]}, [])], "r2"), "another sample"),
    ):
        other = results(tmp_path / "b", *changed)
        assert says in refusal(capsys, *command, paths[0], other), says
    rows[0]["text"]["answers"] = []
    (tmp_path / "n.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert '"text"."answers": expected one at least' in refusal(capsys, *command, paths[0])


def test_stops_are_no_text_and_tasks_weigh_alike(tmp_path):
    texts = [("cwe/1", "cwe", b"a b"), ("cwe/2", "cwe", b"a"), ("vt/1", "vt", b"x\n")]
    samples = [
        {"id": name, "task": task, "ids": [1], "stops": [10]}
        | {"text": {"metric": "contains_all", "answers": ["a", "b"] if task == "cwe" else ["\n"]}}
        for name, task, _ in texts
    ]
    (tmp_path / "d").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    path = results(tmp_path / "r", [(s, list(t[2])) for s, t in zip(samples, texts, strict=True)])
    _, rows = task_scores.scored_rows([tmp_path / "d"], [path], Tokens("bytes"))
    assert [row["score"] for row in rows] == [1, 0.5, 0] and rows[2]["output"] == "x"
    means = {(row["by"], row.get("task")): row["score"] for row in task_scores.means(rows)}
    assert means == {("task", "cwe"): 0.75, ("task", "vt"): 0, ("all", None): 0.375}


def test_bytes_come_back_as_text():
    tokens = Tokens("bytes")
    assert tokens.text(tokens.ids("Ünï → text")) == "Ünï → text"
    assert tokens.spellings("12") == [[49, 50], [32, 49, 50]]
    assert needle.insert("", 0.5, "x.") == "x."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes and some merges, ids after three special tokens; <s> stands in front, a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<user>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([TEXT[:50000]], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    whole = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    whole.chat_template = (
        "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>{% endif %}"
    )
    whole.save_pretrained(folder)
    return folder


def test_a_tokenizers_folder_makes_prompts_as_transformers_does(tmp_path, haystack, tokenizer):
    grid = ["--haystack", haystack, "--lengths", 500, 4000, "--depths", 0.4]
    command = ["needle", *grid, "--out", tmp_path / "n.jsonl", "--tokenizer", tokenizer]
    from transformers import AutoTokenizer

    whole = AutoTokenizer.from_pretrained(tokenizer)
    for chat in (False, True):
        assert tasks.main([*map(str, command), *(["--chat"] if chat else [])]) == 0
        for line in (tmp_path / "n.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert 0.98 * row["length"] <= len(row["ids"]) + 16 <= row["length"]
            assert row["stops"] == [1] and row["ids"].count(0) == 1 + chat
            text = whole.decode(row["ids"])
            if chat:
                said = text.removeprefix("<s><user>").split("</s><s>")
                assert said[0].startswith("Read the text") and said[1] == "Answer:"
                expected = whole.apply_chat_template(
                    [{"role": "user", "content": said[0]}], add_generation_prompt=True
                )["input_ids"]
                assert row["ids"][: len(expected)] == expected
            else:
                assert row["ids"] == whole(text.removeprefix("<s>")).input_ids
            (number,) = row["text"]["answers"]
            assert [whole.decode(ids).strip() for ids in row["answers"][0]] == [number] * 2
    tokens = Tokens(str(tokenizer))
    assert tokens.text([*tokens.ids("day 3"), 1]) == "day 3"
