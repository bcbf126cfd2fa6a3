"""Needle in a haystack: a sentence hidden at a depth of a long text, and a question about it, over a grid of lengths and depths.

In:   a text of the user's, lengths in tokens, depths from 0 to 1. Out: samples. Next: task_samples.py writes them.

The needle stands between two sentences of the text, at or before the depth. Unless the user gives a needle, each sample has a place and
a number of its own, so that nothing can be guessed or carried over. Wordings are this project's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtraining.task_samples import Prompt, Tokens, filled, sample, seeded

PLACES = (
    "Aarhus",
    "Bergamo",
    "Cusco",
    "Dakar",
    "Erfurt",
    "Faro",
    "Galway",
    "Hobart",
    "Izmir",
    "Kyoto",
)
_END = re.compile(r"(?<=[.!?])\s+|\n+")


def insert(text: str, depth: float, sentence: str) -> str:
    """text with the sentence at a depth: behind the last end of a sentence at or before it, or behind a blank where none ends in the
    twentieth of the text before it; at 0 in front, at 1 behind."""
    at = round(depth * len(text))
    if 0 < at < len(text):
        near = max(0, at - len(text) // 20)
        ends = [match.end() + near for match in _END.finditer(text[near:at])]
        if ends:
            at = ends[-1]
        else:
            blank = text.rfind(" ", near, at)
            at = blank + 1 if blank >= 0 else at
    before, after = text[:at], text[at:]
    gap = "" if not before or before[-1].isspace() else " "
    return before + gap + sentence + (" " if after else "") + after.lstrip(" ")


def long_enough(text: str, length: int, repeat: bool) -> str:
    """The text, begun again until it has 12 characters a token where that is asked for."""
    return "\n\n".join([text] * (1 + 12 * length // len(text))) if repeat else text


def samples(
    tokens: Tokens,
    haystack: str,
    lengths: list[int],
    depths: list[float],
    *,
    repeats: int = 1,
    seed: int = 0,
    max_new_tokens: int = 16,
    needle: str | None = None,
    question: str | None = None,
    answers: list[str] | None = None,
    repeat_haystack: bool = False,
) -> Iterator[dict]:
    """Lengths by depths by repeats. needle, question and answers: together or none.

    Errors: ValueError: a haystack too short for a length (unless it may be repeated), a length too short for the question.
    """
    for length in lengths:
        text = long_enough(haystack.strip(), length, repeat_haystack)
        for depth in depths:
            for repeat in range(repeats):
                rng = seeded(seed, "needle", length, depth, repeat)
                place, number = rng.choice(PLACES), str(rng.randrange(10**6, 10**7))
                hidden = (
                    needle
                    or f"The locker at the station of {place} opens with the number {number}."
                )
                asked = (
                    question or f"With which number does the locker at the station of {place} open?"
                )
                expected = answers or [number]

                def build(n, text=text, depth=depth, hidden=hidden, asked=asked, expected=expected):
                    return Prompt(
                        "Read the text below with care; a question about one sentence of it follows.\n\n"
                        f"{insert(text[:n], depth, hidden)}\n\nQuestion: {asked}\n",
                        "Answer:",
                        expected,
                    )

                prompt, ids = filled(
                    tokens, build, len(text), length, max_new_tokens, 3 * length, "the haystack"
                )
                yield sample(
                    tokens,
                    prompt,
                    ids,
                    name=f"needle/{length}/{depth:g}/{repeat}",
                    task="needle",
                    max_new_tokens=max_new_tokens,
                    length=length,
                    depth=depth,
                )
