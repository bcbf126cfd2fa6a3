"""Samples from InfiniteBench's files (arXiv 2402.13718), which the user has downloaded: one JSON lines file a task.

In:   <folder>/<task>.jsonl with "context", "input", "answer", "options"; a length in tokens. Out: samples. Next: task_samples.py.

Numbers of new tokens and rules of scoring are the benchmark's; wordings are this project's. A prompt that is longer than the length loses
the middle of its context, never its question; each sample says how many tokens that were.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtraining.json_lines import read_json_lines
from mtraining.task_samples import Prompt, Tokens, fit, sample

MAX_NEW_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
    "longbook_qa_chn": 40,
    "longbook_sum_eng": 1200,
    "longdialogue_qa_eng": 40,
    "code_debug": 5,
    "code_run": 5,
    "math_find": 3,
    "math_calc": 30000,
}
TASKS = tuple(MAX_NEW_TOKENS)
LETTERS = "ABCD"
_CHOICE = {"longbook_choice_eng", "code_debug"}
# What stands before the context, and how the answer begins. The question stands between them.
_WORDS = {
    "passkey": ("A pass key is hidden in the text below. Find it.", "The pass key is"),
    "number_string": ("A long number is hidden in the text below. Find it.", "The number is"),
    "kv_retrieval": ("Find the value of a key in the JSON object below.", "The value is"),
    "longbook_choice_eng": (
        "Read the book below and choose the right answer.",
        "The letter of the right answer is",
    ),
    "longbook_qa_eng": ("Read the book below and answer the question briefly.", "Answer:"),
    "longbook_qa_chn": ("请阅读以下书籍，并简短回答问题。", "答案："),
    "longbook_sum_eng": ("Read the book below and summarize it.", "Summary:"),
    "longdialogue_qa_eng": (
        "In the dialogue below a name is replaced by $$MASK$$. Find out whose it is.",
        "The name behind $$MASK$$ is",
    ),
    "code_debug": (
        "One function of the code below has a deliberate error. Find it.",
        "The letter of the function with the error is",
    ),
    "code_run": ("Find out what a function of the code below returns.", "It returns"),
    "math_find": ("Find a number in the list below.", "The number is"),
    "math_calc": (
        "Give the value of the expression below after each operation, one after the other.",
        "The values are",
    ),
}
_QUESTION = {
    "longbook_sum_eng": "Summarize the book.",
    "math_calc": "Go through the expression from left to right.",
}


def samples(
    tokens: Tokens,
    folder: Path,
    tasks: list[str],
    length: int,
    *,
    count: int | None = None,
    max_new_tokens: int | None = None,
    likelihood: bool = False,
) -> Iterator[dict]:
    """The first `count` rows of each task (None: all). likelihood: tasks of choice compare how likely the letters are, instead of
    generating. Errors: ValueError naming file and line: a key missing, an answer of another form, a question longer than the length."""
    for task in tasks:
        path = folder / f"{task}.jsonl"
        keys = {"context": (str,), "answer": (str, int, float, list)}
        if task not in _QUESTION:
            keys["input"] = (str,)
        if task in _CHOICE:
            keys["options"] = (list,)
        for number, (where, row) in enumerate(read_json_lines(path, keys)[:count]):
            new = max_new_tokens or MAX_NEW_TOKENS[task]
            by_likelihood = likelihood and task in _CHOICE
            try:
                answers, facts = expected(task, row)
                options = [
                    tokens.spellings(x)[-1] for x in LETTERS[: len(row.get("options") or [])]
                ]
                room = length - (max(map(len, options)) if by_likelihood else new)
                prompt, ids, cut = shortened(tokens, task, row, room)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            prompt.answers, prompt.metric, prompt.facts = answers, task, facts
            found = [] if task in ("longbook_sum_eng", "math_calc") else [str(a) for a in answers]
            line = sample(
                tokens,
                prompt,
                ids,
                name=f"{task}/{row.get('id', number)}" if "id" in row else f"{task}/{number}",
                task=task,
                max_new_tokens=new,
                length=length,
                truncated_tokens=cut,
                token_answers=[facts["letter"]] if "letter" in facts else found,
                match="any",
            )
            if by_likelihood:
                for key in ("answers", "match", "max_new_tokens", "stops"):
                    del line[key]
                line |= {"options": options, "correct": [LETTERS.index(facts["letter"])]}
            yield line


def expected(task: str, row: dict) -> tuple[list, dict]:
    """The answers of a row, and for a task of choice {"letter": ..}. Errors: ValueError."""
    given = row["answer"]
    answers = given if isinstance(given, list) else [given]
    if not answers:
        raise ValueError('"answer": expected one at least, got none')
    if task in ("code_run", "math_find", "math_calc"):
        if not all(isinstance(a, int | float) and not isinstance(a, bool) for a in answers):
            raise ValueError(f'"answer": expected numbers, got {str(answers)[:60]}')
    elif not all(isinstance(a, str) for a in answers):
        raise ValueError(f'"answer": expected texts, got {str(answers)[:60]}')
    if task not in _CHOICE:
        return answers, {}
    options = row["options"]
    if len(options) > len(LETTERS) or not all(isinstance(x, str) for x in options):
        raise ValueError(
            f'"options": expected at most {len(LETTERS)} texts, got {str(options)[:60]}'
        )
    if answers[0] not in options:
        raise ValueError(f'"answer": expected one of "options", got {answers[0][:60]!r}')
    return answers[:1], {"letter": LETTERS[options.index(answers[0])]}


def shortened(tokens: Tokens, task: str, row: dict, room: int) -> tuple[Prompt, list[int], int]:
    """The prompt, its ids and how many tokens the middle of its context lost. Errors: ValueError where the question does not fit."""
    context = row["context"]
    before, lead = _WORDS[task]
    question = _QUESTION.get(task) or row["input"].strip()
    listed = (
        "".join(
            f"\n{letter}. {text}"
            for letter, text in zip(LETTERS, row.get("options") or [], strict=False)
        )
        if task in _CHOICE
        else ""
    )

    def build(n: int) -> Prompt:
        kept = (
            context
            if n >= len(context)
            else context[: n // 2] + context[len(context) - (n - n // 2) :]
        )
        return Prompt(f"{before}\n\n{kept}\n\n{question}{listed}\n", lead)

    def ids_of(n: int) -> list[int]:
        prompt = build(n)
        return tokens.prompt(prompt.text, prompt.lead)

    whole = ids_of(len(context))
    if len(whole) <= room:
        return build(len(context)), whole, 0
    first = max(1, len(context) * room // len(whole))
    try:
        n = fit(lambda n: len(ids_of(n)), len(context), room, first)
    except ValueError as error:
        raise ValueError(f"the question and its words have {error}") from None
    ids = ids_of(n)
    return build(n), ids, len(whole) - len(ids)
