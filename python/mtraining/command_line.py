"""What the package's commands have in common: mistakes are one line `mtraining: error: ..`, exit 2 (1 for a failure).

In:   arguments, a function that does the work. Out: an exit code. Next: prepare.py, generate.py, tasks.py, pattern_files.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


class Parser(argparse.ArgumentParser):
    """Its mistakes are one sentence as well."""

    def error(self, message: str):
        self.exit(2, f"mtraining: error: {message}\n")


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says a default where there is one: not of a switch, nor of what may be left out."""

    def _get_help_string(self, action):
        if action.default is None or action.nargs == 0:
            return action.help
        return super()._get_help_string(action)


class Examples(Defaults, argparse.RawDescriptionHelpFormatter):
    """The same, and what stands before and after the options keeps its lines."""


def positive(name: str):
    """A parser of whole numbers above 0 for argparse, which names the option itself."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if value <= 0:
            raise argparse.ArgumentTypeError(f"expected a number of {name} above 0, got {text!r}")
        return value

    return parse


def reported(work: Callable[[], None]) -> int:
    """Runs it: 0, or the error in one line and 2 for a user's mistake, 1 for a failure."""
    try:
        work()
    except (ValueError, NotImplementedError, OSError) as error:
        return _say(error, 2)
    except (RuntimeError, ImportError) as error:
        return _say(error, 1)
    return 0


def _say(error: Exception, code: int) -> int:
    sys.stdout.flush()
    lines = str(error).splitlines() or [type(error).__name__]
    print(f"mtraining: error: {lines[0]}", file=sys.stderr)
    return code
