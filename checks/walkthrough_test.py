"""docs/walkthrough.md quotes what bench/walkthrough.cc prints: every quoted line, in order, numbers to the last digit but two."""

import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def quoted_lines() -> list[str]:
    blocks = re.findall(r"```text\n(.*?)```", (ROOT / "docs/walkthrough.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def printed_lines() -> list[str]:
    binary = pathlib.Path(os.environ["MTRAINING_BINARY_DIR"]) / "bin/walkthrough"
    run = subprocess.run([binary], capture_output=True, text=True, check=True, timeout=60)
    return run.stdout.splitlines()


def agree(quoted: str, printed: str) -> bool:
    """The same words; decimal numbers may differ by two units in the last place (another instruction set rounds otherwise)."""
    if NUMBER.split(quoted.rstrip()) != NUMBER.split(printed.rstrip()):
        return False
    for a, b in zip(NUMBER.findall(quoted), NUMBER.findall(printed), strict=True):
        mantissa, _, exponent = a.partition("e")
        unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        if abs(float(a) - float(b)) > 2.01 * unit:
            return False
    return True


def test_the_page_quotes_the_program():
    quoted, printed = quoted_lines(), printed_lines()
    assert len(quoted) == len(printed)
    for q, p in zip(quoted, printed, strict=True):
        assert agree(q, p), f"docs/walkthrough.md says\n  {q}\nthe program prints\n  {p}"


def test_a_wrong_digit_is_seen():
    assert agree("lse 6.2964, rank 2", "lse 6.2965, rank 2")
    assert not agree("lse 6.2964, rank 2", "lse 6.2968, rank 2")
    assert not agree("lse 6.2964, rank 2", "lse 6.2964, rank 3")
