"""Samples of long-context tests as `mtraining eval` reads them, and texts that fill a length given in tokens.

In:   a tokenizer, a function that makes a prompt of n units (characters, words, documents ..) of filler. Out: JSON lines.
Next: needle.py, ruler.py, infinitebench.py make prompts; tasks.py writes the file; task_scores.py scores answers.

A prompt is made as text and turned into tokens whole, so that no tokenizer sees other pieces than it would elsewhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

TOLERANCE = 0.03  # a sample may be so much shorter than what was asked for, never longer
_MARK = "\u2063MTRAINING\u2063"  # where a chat's template puts what the user says


class Tokens:
    """Text to ids and back, by a tokenizer's folder or byte by byte.

    chat: prompts are what a user says in the folder's chat template, answers begin what the assistant says.
    Errors: ValueError: no such folder, no tokenizer or no chat template in it.
    """

    def __init__(self, name: str, chat: bool = False):
        self.name = name
        self._tokenizer = None
        self._chat: tuple[str, str] | None = None
        self.stops: list[int] = []
        if name == "bytes":
            if chat:
                raise ValueError("--chat: bytes have no chat template; name a tokenizer's folder")
            return
        if not Path(name).is_dir():
            raise ValueError(f'--tokenizer: expected a folder or "bytes", got {name!r}')
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise ValueError(f"--tokenizer: {name} cannot be read: {first}") from None
        if self._tokenizer.eos_token_id is not None:
            self.stops = [self._tokenizer.eos_token_id]
        if chat:
            if not getattr(self._tokenizer, "chat_template", None):
                raise ValueError(f"--chat: {name} has no chat template")
            said = [{"role": "user", "content": _MARK}]
            text = self._tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True
            )
            if text.count(_MARK) != 1:
                raise ValueError(f"--chat: {name}'s template does not repeat what the user says")
            before, after = text.split(_MARK)
            self._chat = (before, after)

    def ids(self, text: str) -> list[int]:
        """Of text alone: no special tokens."""
        if self._tokenizer is None:
            return list(text.encode())
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def prompt(self, text: str, lead: str = "") -> list[int]:
        """Of a whole prompt. lead: how the answer begins."""
        if self._chat is not None:
            before, after = self._chat
            return self.ids(before + text.strip() + after + lead.lstrip())
        if self._tokenizer is None:
            return self.ids(text + lead)
        return self._tokenizer(text + lead).input_ids

    def spellings(self, text: str) -> list[list[int]]:
        """Of an answer, at a text's beginning and behind a blank."""
        found = [self.ids(text), self.ids(" " + text)]
        return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]

    def text(self, ids: list[int]) -> str:
        """Without special tokens."""
        if self._tokenizer is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return self._tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class Prompt:
    """text + lead is what the model reads."""

    text: str
    lead: str = ""
    answers: list[str] = field(default_factory=list)
    metric: str = "contains_all"
    facts: dict = field(default_factory=dict)  # further keys of the sample's "text"


Build = Callable[[int], Prompt]  # units of filler -> prompt


def fit(count: Callable[[int], int], most: int, room: int, first: int) -> int:
    """The largest n in 0 .. most (to half a percent of room) with count(n) <= room; count grows with n.

    first: a guess. Errors: ValueError where not even count(0) fits.
    """
    low, low_count = 0, count(0)
    if low_count > room:
        raise ValueError(f"{low_count} tokens without any filler, expected at most {room}")
    slack = room // 200
    step = max(1, min(first, most))
    high, high_count = None, 0
    while high is None:
        at = min(most, low + step)
        got = count(at)
        if got > room:
            high, high_count = at, got
        elif at == most or got >= room - slack:
            return at
        else:
            rate = max(got - low_count, 1) / max(at - low, 1)
            low, low_count = at, got
            step = max(1, int(1.01 * (room - got) / rate) + 1)
    turn = 0
    while high - low > 1 and room - low_count > slack:
        turn += 1
        if turn % 3:
            share = (room - low_count) / (high_count - low_count)
            at = low + int(share * (high - low))
        else:
            at = (low + high) // 2
        at = min(max(at, low + 1), high - 1)
        got = count(at)
        if got <= room:
            low, low_count = at, got
        else:
            high, high_count = at, got
    return low


def filled(
    tokens: Tokens, build: Build, most: int, length: int, max_new_tokens: int, first: int, what: str
) -> tuple[Prompt, list[int]]:
    """The prompt of most filler that leaves room for the new tokens in `length`, and its ids.

    what: the filler, for messages. Errors: ValueError: the length holds not even a prompt without filler; the filler is used up
    more than 3 percent below the length.
    """
    kept: dict[int, tuple[Prompt, list[int]]] = {}

    def count(n: int) -> int:
        if n not in kept:
            prompt = build(n)
            kept[n] = (prompt, tokens.prompt(prompt.text, prompt.lead))
        return len(kept[n][1])

    room = length - max_new_tokens
    try:
        n = fit(count, most, room, first)
    except ValueError as error:
        raise ValueError(
            f"length {length} with {max_new_tokens} new tokens: a prompt has {error}"
        ) from None
    count(n)
    prompt, ids = kept[n]
    if n == most and len(ids) < room - TOLERANCE * length:
        raise ValueError(
            f"length {length}: {what} is used up at {len(ids)} tokens, expected {room} less at most 3 percent"
        )
    return prompt, ids


def sample(
    tokens: Tokens,
    prompt: Prompt,
    ids: list[int],
    *,
    name: str,
    task: str,
    max_new_tokens: int,
    length: int | None = None,
    depth: float | None = None,
    truncated_tokens: int = 0,
    token_answers: list[str] | None = None,
    match: str = "all",
) -> dict:
    """A line of the file. token_answers: what to look for among the new tokens; None: the prompt's answers."""
    wanted = prompt.answers if token_answers is None else token_answers
    line = {"id": name, "task": task}
    if length is not None:
        line["length"] = length
    if depth is not None:
        line["depth"] = depth
    if truncated_tokens:
        line["truncated_tokens"] = truncated_tokens
    line |= {
        "max_new_tokens": max_new_tokens,
        "answers": [tokens.spellings(text) for text in wanted],
        "match": match,
        "stops": tokens.stops,
        "text": {"metric": prompt.metric, "answers": prompt.answers, **prompt.facts},
        "ids": ids,
    }
    return line


def write_samples(out: Path, lines: Iterable[dict]) -> dict:
    """Writes the file whole or not at all; returns its counts."""
    part = out.with_name(out.name + ".part")
    counts = {"samples": 0, "truncated": 0, "longest": 0}
    tasks: dict[str, int] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(part, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                counts["samples"] += 1
                counts["truncated"] += "truncated_tokens" in line
                counts["longest"] = max(counts["longest"], len(line["ids"]))
                tasks[line["task"]] = tasks.get(line["task"], 0) + 1
        if not counts["samples"]:
            raise ValueError(f"{out}: expected samples, got none")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return {"out": str(out), **counts, "tasks": tasks}


def seeded(*parts) -> random.Random:
    """The same numbers for the same parts on every machine."""
    return random.Random("/".join(str(part) for part in parts))


def read_text(path: Path) -> str:
    """Errors: ValueError naming the file: not UTF-8, empty; OSError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path}: expected text, got none")
    return text
