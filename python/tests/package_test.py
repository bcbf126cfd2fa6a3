"""The package as an installation sees it: what importing loads, where the library is found, what the documentation shows."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import mtraining

ROOT = pathlib.Path(__file__).resolve().parents[2]


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_importing_the_package_loads_neither_torch_nor_matplotlib_nor_transformers():
    result = python(
        "import sys, mtraining; print([m for m in ('torch', 'matplotlib', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert result.stdout == "[]\n", result.stderr


def test_using_the_operators_loads_neither_matplotlib_nor_transformers():
    result = python(
        "import sys, mtraining; mtraining.sparse_attention; mtraining.ring_attention; mtraining.VerticalSlash(); "
        "print([m for m in ('matplotlib', 'transformers') if m in sys.modules])"
    )
    assert result.stdout == "[]\n", result.stderr


def test_every_public_name_resolves_and_says_what_it_is():
    for name in mtraining.__all__:
        assert getattr(mtraining, name).__doc__, name
        assert name in dir(mtraining)
    with pytest.raises(AttributeError, match="nothing"):
        mtraining.nothing  # noqa: B018


@pytest.mark.parametrize("content", [None, "no library"])
def test_a_library_that_is_missing_or_broken_is_named(tmp_path, content):
    path = tmp_path / "libmtraining_ops.so"
    if content:
        path.write_text(content)
    result = python("import mtraining; mtraining.VerticalSlash()", MTRAINING_LIBRARY=str(path))
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("ImportError: mtraining: ")
    assert str(path) in last and "./dev build" in last


def test_a_named_file_comes_before_a_build_folder_and_that_before_the_checkouts_builds(monkeypatch):
    for name in ("MTRAINING_LIBRARY", "MTRAINING_BINARY_DIR", "MTRAINING_PRESET"):
        monkeypatch.delenv(name, raising=False)

    def first():
        return mtraining.library._candidates()[0]

    assert first() == ROOT / "python/mtraining/libmtraining_ops.so"  # where pip puts it
    monkeypatch.setenv("MTRAINING_PRESET", "tsan")
    assert mtraining.library._candidates()[1].parts[-3:-1] == ("tsan", "lib")
    monkeypatch.setenv("MTRAINING_BINARY_DIR", "/elsewhere")
    assert str(first()) == "/elsewhere/lib/libmtraining_ops.so"
    monkeypatch.setenv("MTRAINING_LIBRARY", "/named.so")
    assert [str(p) for p in mtraining.library._candidates()] == ["/named.so"]


def test_the_example_of_the_documentation_runs():
    text = (ROOT / "docs/python.md").read_text()
    result = python("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)[:2]))
    assert result.returncode == 0, result.stderr
    found = re.search(
        r"density ([\d.]+), recall on other rows ([\d.]+)\nhead 0: (\d+) diagonals, (\d+) columns\n.*differ by (\S+)",
        result.stdout,
    )
    density, recall, diagonals, columns, difference = (float(x) for x in found.groups())
    assert density < 0.8 and 0.3 < recall < 1 and diagonals < 16 and columns > 0
    assert difference < 1e-5
    assert re.search(r"\n0.\d\d, 0.\d\d, recall 0.\d\d\n$", result.stdout), result.stdout
