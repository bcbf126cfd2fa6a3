"""The task families of RULER (arXiv 2404.06654): retrieval, tracing, aggregation, questions, at any length.

In:   a tokenizer, lengths in tokens, for some tasks a text or questions of the user's. Out: samples. Next: task_samples.py.

What is hidden, how often and how it is scored follow the paper's description; wordings, names and word lists are this project's (made of
syllables, or a file of the user's), so that scores compare models with each other, not with published tables.

  niah_single_1..3     one key in repeated noise; in text; in text with a uuid as its value
  niah_multikey_1..3   four keys in text; a haystack that is all needles, words and numbers; the same with uuids
  niah_multivalue      one key with four values
  niah_multiquery      four keys, all asked for
  vt                   a chain of four assignments: which variables have the value
  cwe                  the ten words that stand thirty times in a list where others stand three times
  fwe                  the three most frequent of made-up words, frequencies falling with the square of the rank
  qa                   a question whose document stands among others
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from mtraining.needle import insert
from mtraining.task_samples import Prompt, Tokens, filled, sample, seeded

NOISE = (
    "The rain has stopped. The road is still wet. A cart goes by. Somewhere a door is closed. "
    "The light stays on for a while."
)


@dataclass(frozen=True)
class Retrieval:
    haystack: str  # noise, text, needles
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


RETRIEVAL = {
    "niah_single_1": Retrieval("noise"),
    "niah_single_2": Retrieval("text"),
    "niah_single_3": Retrieval("text", value="uuid"),
    "niah_multikey_1": Retrieval("text", keys=4),
    "niah_multikey_2": Retrieval("needles"),
    "niah_multikey_3": Retrieval("needles", key="uuid", value="uuid"),
    "niah_multivalue": Retrieval("text", values=4),
    "niah_multiquery": Retrieval("text", keys=4, queries=4),
}
MAX_NEW_TOKENS = dict.fromkeys(RETRIEVAL, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
TASKS = tuple(MAX_NEW_TOKENS)
LEAST_WORDS = 20  # of a list of the user's


@dataclass
class Material:
    """What samples are made of. text: for retrieval in text. words: for keys and lists. questions: rows with "question", "answers",
    "documents"."""

    text: str | None = None
    words: list[str] | None = None
    questions: list[dict] | None = None


def made_up_word(rng, syllables: int) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))


def enough_words(given: list[str] | None) -> None:
    """Errors: ValueError where a list of the user's is too short for lists, or for keys that differ."""
    if given is not None and len(given) < LEAST_WORDS:
        raise ValueError(f"--words: expected at least {LEAST_WORDS} words, got {len(given)}")


def distinct_words(rng, count: int, given: list[str] | None) -> list[str]:
    """count: up to LEAST_WORDS."""
    if given is not None:
        return rng.sample(given, count)
    found: dict[str, None] = {}
    while len(found) < count:
        found[made_up_word(rng, 2 + len(found) % 3)] = None
    return list(found)


def value_of(rng, kind: str, words: list[str] | None) -> str:
    if kind == "number":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuid":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return "-".join(distinct_words(rng, 2, words))


def samples(
    tokens: Tokens,
    tasks: list[str],
    lengths: list[int],
    count: int,
    material: Material,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Iterator[dict]:
    """count samples of each task and length. Errors: ValueError: a task's material missing or used up, a length too short."""
    for task in tasks:
        if lack := lacks(task, material):
            raise ValueError(f"{task}: expected {lack}, got none")
    for task in tasks:
        for length in lengths:
            for number in range(count):
                name = f"{task}/{length}/{number}"
                new = max_new_tokens or MAX_NEW_TOKENS[task]
                make = _MAKERS.get(task, retrieval)
                build, most, first, what = make(task, (seed, name), length, number, material)
                try:
                    prompt, ids = filled(tokens, build, most, length, new, first, what)
                except ValueError as error:
                    raise ValueError(f"{task}: {error}") from None
                yield sample(
                    tokens,
                    prompt,
                    ids,
                    name=name,
                    task=task,
                    max_new_tokens=new,
                    length=length,
                    match="any" if prompt.metric == "contains_any" else "all",
                )


def lacks(task: str, material: Material) -> str | None:
    """The option that gives what the task is made of, where it was not given."""
    if task in RETRIEVAL and RETRIEVAL[task].haystack == "text" and material.text is None:
        return "--haystack FILE"
    if task == "qa" and material.questions is None:
        return "--questions FILE.jsonl"
    return None


def retrieval(task: str, seed: tuple, length: int, number: int, material: Material):
    what = RETRIEVAL[task]
    if what.key == "word":
        enough_words(material.words)
    rng = seeded(*seed)
    keys: list[str] = []
    while len(keys) < what.keys:
        key = value_of(rng, what.key, material.words)
        if key not in keys:
            keys.append(key)
    pairs = [(key, value_of(rng, what.value, None)) for key in keys for _ in range(what.values)]
    depths = sorted(rng.random() for _ in pairs)
    asked = keys[: what.queries]
    answers = [value for key, value in pairs if key in asked]
    rng.shuffle(pairs)
    kind = "numbers" if what.value == "number" else "codes"

    def sentence(key: str, value: str) -> str:
        return f"One of the secret {kind} of {key} is {value}."

    if what.haystack == "text":
        most, first, filler = len(material.text), 3 * length, "the haystack"
    else:
        most, first, filler = 10**9, length // 20, "filler"

    def another(r) -> str:
        key = keys[0]
        while key in keys:
            key = value_of(r, what.key, material.words)
        return sentence(key, value_of(r, what.value, None))

    drawn = _Drawn(seeded(*seed, "needles"), another)

    def haystack(n: int) -> str:
        if what.haystack == "text":
            return material.text[:n]
        return " ".join(noise(n) if what.haystack == "noise" else drawn.take(n))

    def build(n: int) -> Prompt:
        hay = haystack(n)
        for depth, (key, value) in zip(reversed(depths), reversed(pairs), strict=True):
            hay = insert(hay, depth, sentence(key, value))
        which = ", ".join(asked)
        return Prompt(
            f"The text below hides some secret {kind}. Remember them: you will be asked for them.\n{hay}\n"
            f"What are all the secret {kind} of {which} that the text gives?\n",
            f"The secret {kind} of {which} that the text gives are",
            answers,
        )

    return build, most, first, filler


def noise(n: int) -> list[str]:
    """n sentences, the same few again and again."""
    cycle = [piece.strip() for piece in re.findall(r"[^.]+\.", NOISE)]
    return [cycle[i % len(cycle)] for i in range(n)]


class _Drawn:
    """A list that grows as it is asked for, always by the same draws: a longer haystack begins with the shorter one."""

    def __init__(self, rng, draw):
        self._rng, self._draw, self._items = rng, draw, []

    def take(self, n: int) -> list[str]:
        while len(self._items) < n:
            self._items.append(self._draw(self._rng))
        return self._items[:n]


def tracing(task: str, seed: tuple, length: int, number: int, material: Material):
    def chain(rng):
        names: dict[str, None] = {}
        while len(names) < 5:
            names["".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(5))] = None
        names = list(names)
        value = str(rng.randrange(10**4, 10**5))
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:], strict=False)]
        return names, value, lines, sorted(rng.random() for _ in lines)

    def text(n, made):
        names, value, lines, depths = made
        pieces = noise(n)
        for depth, line in zip(reversed(depths), reversed(lines), strict=True):
            pieces.insert(round(depth * n), f"{line}.")
        hay = "\n".join(pieces)
        return (
            f"The text below assigns values to variables, directly or through other variables. Follow them.\n{hay}\n"
            f"Which variables have the value {value} in the text? There are five.\n",
            f"The variables with the value {value} are",
        )

    shown, asked = chain(seeded(*seed, "example")), chain(seeded(*seed))
    example = "".join(text(5, shown)) + " " + ", ".join(shown[0]) + ".\n\n"

    def build(n: int) -> Prompt:
        body, lead = text(n, asked)
        return Prompt(example + body, lead, asked[0])

    return build, 10**9, length // 8, "filler"


def common_words(task: str, seed: tuple, length: int, number: int, material: Material):
    enough_words(material.words)
    rng = seeded(*seed)
    most = 10**9 if material.words is None else len(material.words) - LEAST_WORDS
    pool = distinct_words(rng, LEAST_WORDS, material.words)
    shown, common = pool[:10], pool[10:]
    rest = [w for w in material.words if w not in pool] if material.words is not None else None
    if rest is not None:
        rng.shuffle(rest)
        drawn = _Drawn(rng, lambda _: rest.pop())
    else:
        seen = set(pool)

        def draw(r):
            while True:
                word = made_up_word(r, 2 + r.randrange(3))
                if word not in seen:
                    seen.add(word)
                    return word

        drawn = _Drawn(rng, draw)

    def text(often, common_times, seldom, seldom_times, key):
        words = often * common_times + seldom * seldom_times
        seeded(*seed, key).shuffle(words)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return (
            f"The numbered list below has words that stand in it often and words that stand in it seldom.\n{listed}\n"
            "Which ten words stand in the list most often?\n",
            "The ten words that stand in the list most often are",
        )

    def build(n: int) -> Prompt:
        others = drawn.take(n)
        example = "".join(text(shown, 10, others[:10], 3, "example"))
        body, lead = text(common, 30, others, 3, "list")
        return Prompt(f"{example} {', '.join(shown)}.\n\n{body}", lead, common)

    return build, most, length // 12, "the list of words"


def frequent_words(task: str, seed: tuple, length: int, number: int, material: Material):
    rng = seeded(*seed)
    words: dict[str, None] = {}
    while len(words) < 2000:
        words["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))] = None
    words = list(words)
    answers = words[:3]

    def build(n: int) -> Prompt:
        # Of n words a share of 1 / rank^2; the first rank is noise, the next three are asked for and must differ in number.
        total = sum(1 / rank**2 for rank in range(1, len(words) + 2))
        times = [round(n / (total * rank**2)) for rank in range(1, len(words) + 2)]
        for i, least in ((3, 2), (2, 3), (1, 4)):
            times[i] = max(times[i], least, times[i + 1] + 1)
        items = ["...."] * times[0]
        for word, count in zip(words, times[1:], strict=True):
            items += [word] * count
        seeded(*seed, "order").shuffle(items)
        return Prompt(
            "The text below is made of words in code. Count how often each word in code stands in it; dots are no words.\n"
            f"{' '.join(items)}\nWhich three words in code stand in the text most often?\n",
            "The three words in code that stand in the text most often are",
            answers,
        )

    return build, 10**9, length // 4, "filler"


def questions(task: str, seed: tuple, length: int, number: int, material: Material):
    rng = seeded(*seed)
    rows = material.questions
    row = rows[number % len(rows)]
    own = list(dict.fromkeys(row["documents"]))
    others = list(dict.fromkeys(d for r in rows if r is not row for d in r["documents"]))
    others = [d for d in others if d not in own]
    rng.shuffle(others)

    def build(n: int) -> Prompt:
        listed = own + others[:n]
        seeded(*seed, "order").shuffle(listed)
        body = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(listed, 1))
        return Prompt(
            "Answer the question from the documents below, with the answer alone.\n\n"
            f"{body}\n\nQuestion: {row['question']}\n",
            "Answer:",
            row["answers"],
            "contains_any",
        )

    return build, len(others), max(1, length // 200), "--questions"


_MAKERS = {"vt": tracing, "cwe": common_words, "fwe": frequent_words, "qa": questions}
