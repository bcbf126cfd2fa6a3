"""Scores of generated text, after each test's own rules, and their means.

In:   samples, rows of `mtraining eval`, a tokenizer. Out: a score from 0 to 1 a row; means by task, length and depth; a picture.
Next: tasks.py prints them; plots.py draws.

RULER: the share of answers that stand in the text (questions: whether one does), letters' case aside. InfiniteBench: each task's rule, its
paper's appendix and published scorer; summaries by ROUGE-L over lines (Lin 2004), words of letters and digits, not stemmed.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from mtraining.json_lines import read_json_lines
from mtraining.task_samples import Tokens

LEVELS = ("task,length,depth", "task,length", "task", "length", "all")


def contains_all(text: str, answers: list[str], facts: dict) -> float:
    return sum(a.lower() in text.lower() for a in answers) / len(answers)


def contains_any(text: str, answers: list[str], facts: dict) -> float:
    return float(any(a.lower() in text.lower() for a in answers))


def _first_number(text: str, answers: list[str], facts: dict) -> float:
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found.group() == answers[0])


def _words(text: str, apart: str) -> list[str]:
    return text.translate(str.maketrans(dict.fromkeys(apart, " "))).split()


def _key_value(text: str, answers: list[str], facts: dict) -> float:
    return float(answers[0] in _words(text, "\n:\"'.,?!{}"))


def _name(text: str, answers: list[str], facts: dict) -> float:
    said = [word.upper() for word in _words(text, "\n:\"'.,?!{}")]
    return float(any(answer.upper() in said for answer in answers))


def _last_number(text: str, answers: list, facts: dict) -> float:
    said = _words(text, "\n.`'\":")
    try:
        return float(bool(said) and int(said[-1]) == answers[0])
    except ValueError:
        return 0.0


def _number(text: str, answers: list, facts: dict) -> float:
    found = re.search(r"[0-9]+\.[0-9]+|[0-9]+", text)
    if found is None:
        return 0.0
    wanted = answers[0]
    return float(
        int(found.group().partition(".")[0]) == wanted
        if isinstance(wanted, int)
        else float(found.group()) == wanted
    )


def _leading_numbers(text: str, answers: list, facts: dict) -> float:
    said = [int(number) for number in re.findall(r"[0-9]+", text)]
    right = 0
    for got, wanted in zip(said, answers, strict=False):
        if got != wanted:
            break
        right += 1
    return right / len(answers)


def _letter(text: str, answers: list[str], facts: dict) -> float:
    text = text.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] == facts["letter"])
    said = " ".join(_words(text, "\n\"'.,?!{}"))
    for lead in ("answer is:", "answer:", "answer is", "option is"):
        if lead in said:
            return float(said.split(lead, 1)[1].strip().startswith(facts["letter"]))
    return float(
        next((word for word in said.split() if word in tuple("ABCD")), "") == facts["letter"]
    )


def _function(text: str, answers: list[str], facts: dict) -> float:
    letter = facts["letter"]
    text = text.strip()
    if re.match(rf"{letter}\b", text):
        return 1.0
    said = " ".join(_words(text, "\n`'\"-*"))
    for lead in ("answer is:", "is:", "answer:"):
        if lead in said:
            rest = said.split(lead, 1)[1].strip()
            return float(re.match(rf"{letter}\b", rest) is not None or rest.startswith(answers[0]))
    return 0.0


def _f1(said: Iterable[str], wanted: Iterable[str]) -> float:
    said, wanted = Counter(said), Counter(wanted)
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


def _english(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in text.split() if word not in ("a", "an", "the")]


def _chinese(text: str) -> list[str]:
    return [c for c in text.lower() if c.isalnum()]


def rouge_l(text: str, reference: str) -> float:
    """F1 of the union of longest common subsequences, line by line of the reference; each word counts as often as both have it."""
    lines = [
        [re.findall(r"[a-z0-9]+", line) for line in t.lower().split("\n")]
        for t in (text, reference)
    ]
    said, wanted = ([line for line in side if line] for side in lines)
    left = Counter(word for line in said for word in line)
    total = left.total() + sum(map(len, wanted))
    if not said or not wanted:
        return 0.0
    hits = 0
    for line in wanted:
        union = set().union(*(_common_places(line, other) for other in said))
        for place in union:
            if left[line[place]] > 0:
                hits += 1
                left[line[place]] -= 1
    return 2 * hits / total


def _common_places(line: list[str], other: list[str]) -> set[int]:
    """Places in `line` of a longest common subsequence with `other`."""
    table = [[0] * (len(other) + 1)]
    for word in line:
        last, row = table[-1], [0]
        for j, against in enumerate(other):
            row.append(last[j] + 1 if word == against else max(last[j + 1], row[j]))
        table.append(row)
    places, i, j = set(), len(line), len(other)
    while i and j:
        if line[i - 1] == other[j - 1]:
            places.add(i - 1)
            i, j = i - 1, j - 1
        elif table[i - 1][j] >= table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return places


METRICS: dict[str, Callable[[str, list, dict], float]] = {
    "contains_all": contains_all,
    "contains_any": contains_any,
    "passkey": _first_number,
    "number_string": _first_number,
    "kv_retrieval": _key_value,
    "longbook_choice_eng": _letter,
    "longbook_qa_eng": lambda text, answers, facts: max(
        _f1(_english(text), _english(a)) for a in answers
    ),
    "longbook_qa_chn": lambda text, answers, facts: max(
        _f1(_chinese(text), _chinese(a)) for a in answers
    ),
    "longbook_sum_eng": lambda text, answers, facts: max(rouge_l(text, a) for a in answers),
    "longdialogue_qa_eng": _name,
    "code_debug": _function,
    "code_run": _last_number,
    "math_find": _number,
    "math_calc": _leading_numbers,
}


def scored_rows(
    data: list[Path], results: list[Path], tokens: Tokens
) -> tuple[list[dict], list[dict]]:
    """Facts of the runs, and a row a result: "score" and "output" of its text beside what identifies it.

    Errors: ValueError naming file and line: a result whose sample no data file has, one twice, a metric that is unknown; arms (patterns)
    of other weights, types or devices, or of other samples than each other.
    """
    wanted = {}
    for path in data:
        for where, row in read_json_lines(path, {"id": (str,), "task": (str,), "ids": (list,)}):
            if row["id"] in wanted:
                raise ValueError(f"{where}: {row['id']!r} is there twice")
            wanted[row["id"]] = row | {"prompt_tokens": len(row.pop("ids"))}
    runs: dict[str, dict] = {}
    rows: dict[tuple, dict] = {}
    for path in results:
        for where, row in read_json_lines(path, {"run": (str,)}):
            if "id" not in row:
                runs.setdefault(row["run"], row)
                continue
            if "by" in row:
                continue
            if row["id"] not in wanted:
                raise ValueError(
                    f"{where}: {row['id']!r} is in none of {', '.join(map(str, data))}"
                )
            given = wanted[row["id"]]
            if given["prompt_tokens"] != row["prompt_tokens"] or given["task"] != row["task"]:
                raise ValueError(f"{where}: {row['id']!r} was another sample than --data has")
            key = (row["attention"], row["id"])
            if key in rows:
                raise ValueError(f"{where}: {row['id']!r} with {row['attention']} is there twice")
            rows[key] = _scored(where, row, given, tokens)
    _check_arms(runs, rows)
    return list(runs.values()), list(rows.values())


def _scored(where: str, row: dict, given: dict, tokens: Tokens) -> dict:
    made = {
        key: row[key]
        for key in ("id", "task", "attention", "length", "depth", "truncated_tokens", "run")
    }
    if "choice" in row:
        return made | {"output": row["choice"], "score": float(row["choice"] in given["correct"])}
    text = given.get("text") or {}
    metric = text.get("metric")
    if metric not in METRICS:
        raise ValueError(
            f'{where}: the sample\'s "text"."metric": expected one of {", ".join(METRICS)}, got {metric!r}'
        )
    answers = text.get("answers")
    if not isinstance(answers, list) or not answers:
        raise ValueError(
            f'{where}: the sample\'s "text"."answers": expected one at least, got none'
        )
    ids = row["output"]
    if ids and ids[-1] in given.get("stops", []):
        ids = ids[:-1]
    output = tokens.text(ids)
    return made | {"output": output, "score": METRICS[metric](output, answers, text)}


def _check_arms(runs: dict[str, dict], rows: dict[tuple, dict]) -> None:
    samples: dict[str, set] = {}
    used: dict[str, set] = {}
    for (attention, name), row in rows.items():
        samples.setdefault(attention, set()).add(name)
        used.setdefault(attention, set()).add(row["run"])
    for attention, found in used.items():
        if len(found) > 1:
            raise ValueError(
                f"rows with {attention} are of {len(found)} runs of different weights or settings"
            )
    for key in ("weights", "dtype"):
        found = {runs[row["run"]][key] for row in rows.values() if row["run"] in runs}
        if len(found) > 1:
            raise ValueError(f"patterns were run with different {key}: {', '.join(sorted(found))}")
    sets = list(samples.items())
    for attention, names in sets[1:]:
        if names != sets[0][1]:
            only = sorted(names ^ sets[0][1])
            raise ValueError(
                f"{attention} and {sets[0][0]} answered different samples ({len(only)} by one alone, first {only[0]!r}): let the runs end"
            )


def means(rows: list[dict]) -> list[dict]:
    """A row a group of each level, as `mtraining eval` prints them. Over tasks: the mean of their means."""
    made = []
    for attention in dict.fromkeys(row["attention"] for row in rows):
        own = [row for row in rows if row["attention"] == attention]
        for level in LEVELS:
            keys = [] if level == "all" else level.split(",")
            if any(all(row[key] is None for row in own) for key in keys):
                continue
            groups: dict[tuple, list[dict]] = {}
            for row in own:
                groups.setdefault(tuple(row[key] for key in keys), []).append(row)
            for values in sorted(groups, key=lambda v: [(x is not None, x) for x in v]):
                group = groups[values]
                tasks: dict[str, list[float]] = {}
                for row in group:
                    tasks.setdefault(row["task"], []).append(row["score"])
                score = sum(sum(s) / len(s) for s in tasks.values()) / len(tasks)
                made.append(
                    {"attention": attention, "by": level}
                    | dict(zip(keys, values, strict=True))
                    | {
                        "samples": len(group),
                        "truncated": sum(row["truncated_tokens"] > 0 for row in group),
                        "score": score,
                    }
                )
    return made


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
