"""Finds and loads the shared library that registers torch.ops.mtraining.

In:   MTRAINING_LIBRARY (a file), MTRAINING_BINARY_DIR (a build folder), the installed package, build/<preset>/lib of a checkout.
Out:  torch.ops.mtraining and torch.classes.mtraining. Next: every module that calls an operator imports `ops` from here.
"""

import os
import pathlib

import torch

_NAME = "libmtraining_ops.so"


def _candidates() -> list[pathlib.Path]:
    """Files to try, best first: of a checkout's builds the one that MTRAINING_PRESET names, then the newer ones."""
    if named := os.environ.get("MTRAINING_LIBRARY"):
        return [pathlib.Path(named)]
    package = pathlib.Path(__file__).resolve().parent
    found = []
    if build := os.environ.get("MTRAINING_BINARY_DIR"):
        found.append(pathlib.Path(build) / "lib" / _NAME)
    found.append(package / _NAME)
    built = [package.parents[1] / "build" / p / "lib" / _NAME for p in ("cuda", "cpu")]
    built.sort(key=lambda p: p.stat().st_mtime if p.is_file() else 0, reverse=True)
    if preset := os.environ.get("MTRAINING_PRESET"):
        built.insert(0, package.parents[1] / "build" / preset / "lib" / _NAME)
    return found + built


def _load() -> None:
    tried = _candidates()
    for path in tried:
        if path.is_file():
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                raise ImportError(
                    f"mtraining: {path} does not load beside torch {torch.__version__} "
                    f"({str(error).splitlines()[0]}); build it again with ./dev build"
                ) from None
            return
    looked = ", ".join(str(p) for p in tried)
    raise ImportError(
        f"mtraining: {_NAME} is not built: run ./dev build in the checkout, or name the file in "
        f"MTRAINING_LIBRARY (looked for {looked})"
    )


_load()
ops = torch.ops.mtraining
