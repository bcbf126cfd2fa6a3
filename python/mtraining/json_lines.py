"""Files with a JSON object a line.

In:   a path, keys that each object must have. Out: the objects, each with its place for messages. Next: benchmarks.py, generate.py, tasks.py.
"""

from __future__ import annotations

import json
from pathlib import Path


def read_json_lines(path: Path, keys: dict[str, tuple[type, ...]]) -> list[tuple[str, dict]]:
    """("file:line", object) of each line that is not blank; each has these keys, of one of these types.

    Errors: ValueError naming file and line; a file without objects; OSError.
    """
    rows = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError:
                raise ValueError(f"{where}: expected UTF-8 text") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {line.decode()[:60]!r}")
            for key, types in keys.items():
                if key not in row or not isinstance(row[key], types):
                    names = " or ".join(t.__name__ for t in types)
                    got = type(row[key]).__name__ if key in row else "none"
                    raise ValueError(f'{where}: "{key}": expected {names}, got {got}')
            rows.append((where, row))
    if not rows:
        raise ValueError(f"{path}: expected lines with a JSON object each, got none")
    return rows
