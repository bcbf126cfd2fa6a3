"""Makes the files that `mtraining eval needle|ruler|infinitebench` reads, and scores the text of what it wrote.

In:   texts of the user's, a tokenizer. Out: JSON lines; scores, a heat map. Next: docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mtraining import infinitebench, needle, ruler
from mtraining.command_line import Examples, Parser, positive, reported
from mtraining.json_lines import read_json_lines
from mtraining.task_samples import Tokens, read_text, write_samples

_TOKENIZER = 'a tokenizer\'s folder, or "bytes": ids are bytes'


def main(arguments: list[str] | None = None) -> int:
    o = _parser().parse_args(arguments)
    return reported(lambda: o.work(o))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mtraining.tasks",
        description=__doc__.split("\n\n")[0],
        formatter_class=Examples,
        epilog="""examples:
  python -m mtraining.tasks needle --tokenizer models/base --haystack book.txt --lengths 4096 32768 131072 --out needle.jsonl
  python -m mtraining.tasks ruler --tokenizer models/base --haystack book.txt --lengths 8192 --samples 50 --out ruler.jsonl
  python -m mtraining.tasks infinitebench --tokenizer models/base --folder InfiniteBench --tasks passkey code_run --length 131072 --out ib.jsonl
  mtraining eval needle --checkpoint models/base --data needle.jsonl --out needle.out.jsonl
  python -m mtraining.tasks score --tokenizer models/base --data needle.jsonl --results needle.out.jsonl --png needle.png""",
    )
    kinds = parser.add_subparsers(required=True, metavar="needle|ruler|infinitebench|score")

    def kind(name: str, work, text: str) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=text, description=text, formatter_class=Examples)
        made.set_defaults(work=work)
        made.add_argument("--tokenizer", required=True, help=_TOKENIZER)
        return made

    def maker(name: str, work, text: str) -> argparse.ArgumentParser:
        made = kind(name, work, text)
        made.add_argument("--out", type=Path, required=True, help="the file that is made")
        made.add_argument(
            "--chat", action="store_true", help="prompts in the folder's chat template"
        )
        made.add_argument(
            "--max-new-tokens", type=positive("tokens"), help="instead of the task's own number"
        )
        return made

    def grid(made: argparse.ArgumentParser) -> None:
        made.add_argument("--haystack", type=Path, help="a text file (UTF-8)")
        made.add_argument(
            "--lengths",
            type=positive("tokens"),
            nargs="+",
            required=True,
            help="tokens of prompt and answer together",
        )
        made.add_argument(
            "--repeat-haystack",
            action="store_true",
            help="begin the text again where it is too short",
        )
        made.add_argument("--seed", type=int, default=0, help="of places and values")

    made = maker("needle", make_needle, "A sentence hidden in a text, over lengths and depths.")
    grid(made)
    made.add_argument(
        "--depths",
        type=float,
        nargs="+",
        default=[i / 10 for i in range(11)],
        help="0: at the beginning, 1: at the end",
    )
    made.add_argument(
        "--samples", type=positive("samples"), default=1, help="of each length and depth"
    )
    made.add_argument("--needle", help="your own sentence, with --question and --answer")
    made.add_argument("--question")
    made.add_argument("--answer", nargs="+", help="texts that must all stand in the answer")

    made = maker("ruler", make_ruler, "RULER's task families.")
    grid(made)
    made.add_argument(
        "--tasks",
        nargs="+",
        default=["all"],
        help=f"of {', '.join(ruler.TASKS)}; all: those that have what they need",
    )
    made.add_argument(
        "--samples", type=positive("samples"), default=20, help="of each task and length"
    )
    made.add_argument(
        "--words", type=Path, help="a word a line, for keys and lists (absent: made of syllables)"
    )
    made.add_argument(
        "--questions",
        type=Path,
        help='for qa: JSON lines {"question": "..", "answers": [".."], "documents": [".."]}',
    )

    made = maker(
        "infinitebench",
        make_infinitebench,
        "InfiniteBench's tasks from its files, which you have downloaded.",
    )
    made.add_argument(
        "--folder", type=Path, required=True, help="with passkey.jsonl, kv_retrieval.jsonl, .."
    )
    made.add_argument(
        "--tasks",
        nargs="+",
        default=["all"],
        help=f"of {', '.join(infinitebench.TASKS)}; all: those whose file is there",
    )
    made.add_argument(
        "--length",
        type=positive("tokens"),
        required=True,
        help="of prompt and answer; longer contexts lose their middle",
    )
    made.add_argument(
        "--samples", type=positive("samples"), help="the first so many of each task (absent: all)"
    )
    made.add_argument(
        "--likelihood",
        action="store_true",
        help="tasks of choice compare how likely the letters are, instead of generating",
    )

    made = kind(
        "score",
        score,
        "Scores of the text of `mtraining eval`'s rows, after each test's own rules.",
    )
    made.add_argument("--data", type=Path, nargs="+", required=True, help="the samples")
    made.add_argument(
        "--results", type=Path, nargs="+", required=True, help="what mtraining eval wrote (--out)"
    )
    made.add_argument("--out", type=Path, help="a row with text and score for each sample")
    made.add_argument("--png", type=Path, help="a heat map over length and depth")
    return parser


def make_needle(o: argparse.Namespace) -> None:
    if o.haystack is None:
        raise ValueError("needle: expected --haystack FILE, got none")
    own = [o.needle, o.question, o.answer]
    if any(own) and not all(own):
        raise ValueError("--needle, --question and --answer: expected all three or none")
    for depth in o.depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"--depths: expected numbers from 0 to 1, got {depth:g}")
    lines = needle.samples(
        Tokens(o.tokenizer, o.chat),
        read_text(o.haystack),
        _distinct("--lengths", o.lengths),
        _distinct("--depths", o.depths),
        repeats=o.samples,
        seed=o.seed,
        max_new_tokens=o.max_new_tokens or 16,
        needle=o.needle,
        question=o.question,
        answers=o.answer,
        repeat_haystack=o.repeat_haystack,
    )
    _print(write_samples(o.out, lines))


def make_ruler(o: argparse.Namespace) -> None:
    material = ruler.Material()
    if o.haystack is not None:
        material.text = needle.long_enough(read_text(o.haystack), max(o.lengths), o.repeat_haystack)
    if o.words is not None:
        material.words = list(dict.fromkeys(read_text(o.words).split()))
    if o.questions is not None:
        keys = {"question": (str,), "answers": (list,), "documents": (list,)}
        rows = read_json_lines(o.questions, keys)
        for where, row in rows:
            for key in ("answers", "documents"):
                if not row[key] or not all(isinstance(x, str) and x.strip() for x in row[key]):
                    raise ValueError(f'{where}: "{key}": expected texts, got {str(row[key])[:60]}')
        material.questions = [row for _, row in rows]
    tasks = _chosen(o.tasks, ruler.TASKS, lambda task: ruler.lacks(task, material) is None)
    lines = ruler.samples(
        Tokens(o.tokenizer, o.chat),
        tasks,
        _distinct("--lengths", o.lengths),
        o.samples,
        material,
        o.seed,
        o.max_new_tokens,
    )
    _print(write_samples(o.out, lines))


def make_infinitebench(o: argparse.Namespace) -> None:
    tasks = _chosen(o.tasks, infinitebench.TASKS, lambda t: (o.folder / f"{t}.jsonl").is_file())
    lines = infinitebench.samples(
        Tokens(o.tokenizer, o.chat),
        o.folder,
        tasks,
        o.length,
        count=o.samples,
        max_new_tokens=o.max_new_tokens,
        likelihood=o.likelihood,
    )
    _print(write_samples(o.out, lines))


def score(o: argparse.Namespace) -> None:
    from mtraining import task_scores

    runs, rows = task_scores.scored_rows(o.data, o.results, Tokens(o.tokenizer))
    if not rows:
        raise ValueError(f"{', '.join(map(str, o.results))}: expected rows of samples, got none")
    if o.out is not None:
        task_scores.write_rows(o.out, rows)
    means = task_scores.means(rows)
    for row in [*runs, *means]:
        _print(row)
    if o.png is not None:
        from mtraining import plots

        plots.plot_needle(means, o.png)


def _chosen(asked: list[str], known: tuple[str, ...], available) -> list[str]:
    if asked == ["all"]:
        found = [task for task in known if available(task)]
        if not found:
            raise ValueError("--tasks all: none has what it needs")
        return found
    for task in asked:
        if task not in known:
            raise ValueError(f"--tasks: expected all or some of {', '.join(known)}, got {task!r}")
    return _distinct("--tasks", asked)


def _distinct(option: str, values: list) -> list:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{option}: {value} is given twice")
    return values


def _print(row: dict) -> None:
    print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
