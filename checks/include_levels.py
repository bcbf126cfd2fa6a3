"""Checks that the tree keeps its levels: who may include whom, where torch, CUDA and operator registrations may stand.

Run without arguments for this tree; prints one line a fault and exits 1 if there is any. The table is the one of README.md and
CONTRIBUTING.md; a folder that is not in it is a fault.
"""

import pathlib
import re
import sys
from collections.abc import Iterator

LEVELS = {
    "base": 0,
    "layout": 1,
    "topology": 1,
    "kernels": 1,
    "ring": 2,
    "index": 2,
    "trace": 2,
    "comm": 2,
    "sim": 3,
    "pattern": 3,
    "attention": 4,
    "model": 5,
    "torch_ops": 5,
    "optim": 5,
    "data": 5,
    "checkpoint": 6,
    "train": 7,
    "eval": 7,
}
TESTING_LEVEL = (
    4  # testing/ may include what attention/ is and below; so may every test, whatever its folder
)
# Folders that build without torch (preset core) and therefore may not include it; comm/ may in its c10d file only.
TORCH_FREE = {"base", "layout", "topology", "kernels", "ring", "index", "trace", "sim", "comm"}
# A name made of one of these says nothing about what the file is for.
FORBIDDEN_WORDS = {
    "common",
    "util",
    "utils",
    "misc",
    "manager",
    "helper",
    "helpers",
    "fast",
    "new",
    "v2",
}
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2)/")
REGISTRATION = re.compile(r"\b(STABLE_)?TORCH_LIBRARY\w*\s*\(")
LAUNCH = re.compile(r"<<<")
PRINT_OR_EXIT = re.compile(
    r"(?<![\w.>:])(?:std::)?(exit|printf|fprintf|puts)\s*\(|\bstd::(abort\s*\(|cout\b)"
)
CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'',
    re.S,
)


def without_comments(text: str, keep_strings: bool) -> str:
    """The source with comments (and string literals) blanked, line numbers kept."""

    def blank(match: re.Match) -> str:
        token = match.group(0)
        if keep_strings and not token.startswith(("//", "/*")):
            return token
        return "\n" * token.count("\n") or " "

    return CODE.sub(blank, text)


def is_test(path: pathlib.PurePath) -> bool:
    """Tests, benches, and the cases (foo_case.h) that several tests of a folder share."""
    return path.stem.endswith(("_test", "_bench", "_case")) or path.parts[0] == "bench"


def faults_of_includes(root: pathlib.Path, path: pathlib.PurePath, text: str) -> Iterator[str]:
    folder = path.parts[1] if path.parts[0] == "mtraining" else path.parts[0]
    level = LEVELS.get(folder, TESTING_LEVEL + 1 if folder == "testing" else 8)
    if is_test(path):
        level = max(level, TESTING_LEVEL + 1)
    c10d_file = folder == "comm" and path.stem.startswith("c10d")
    for match in INCLUDE.finditer(without_comments(text, keep_strings=True)):
        quote, header = match.groups()
        where = f"{path}:{text.count(chr(10), 0, match.start(2)) + 1}"
        if TORCH_HEADER.match(header):
            if folder in TORCH_FREE and not c10d_file:
                yield f"{where}: {folder}/ builds without torch, but includes {header}"
            elif "c10d/" in header and not c10d_file:
                yield f"{where}: only comm/c10d* may include c10d, not {folder}/: {header}"
            continue
        if quote == "<":
            if header.startswith(("mtraining/", "cli/", "bench/")):
                yield f'{where}: expected #include "{header}", got <{header}>'
            continue
        parts = pathlib.PurePath(header).parts
        if parts[0] not in ("mtraining", "cli", "bench"):
            yield f'{where}: expected an include from the root ("mtraining/<folder>/<file>.h"), got "{header}"'
            continue
        if not (root / header).is_file():
            yield f"{where}: {header} does not exist"
            continue
        if parts[0] != "mtraining":
            # The command line prints what bench/ measures.
            if parts[0] != path.parts[0] and (path.parts[0], parts[0]) != ("cli", "bench"):
                yield f"{where}: nothing includes {parts[0]}/, but {path.parts[0]}/ includes {header}"
            continue
        target = parts[1]
        if target == folder:
            continue
        if target == "testing":
            if not is_test(path):
                yield f"{where}: testing/ is for tests and benches only, but {path.name} includes {header}"
        elif LEVELS.get(target, 99) >= level:
            yield f"{where}: {folder}/ (level {level}) may not include {target}/ (level {LEVELS.get(target)}): {header}"


def faults_of_file(root: pathlib.Path, path: pathlib.PurePath) -> Iterator[str]:
    text = (root / path).read_text()
    yield from faults_of_includes(root, path, text)
    code = without_comments(text, keep_strings=False)
    in_library = path.parts[0] == "mtraining"
    folder = path.parts[1] if in_library else path.parts[0]

    def line(match: re.Match) -> int:
        return code.count("\n", 0, match.start()) + 1

    if folder != "torch_ops" and (found := REGISTRATION.search(code)):
        yield f"{path}:{line(found)}: only torch_ops/ registers operators, but {folder}/ uses {found.group(0).rstrip('( ')}"
    if path.suffix in (".cu", ".cuh") and folder not in ("kernels", "bench"):
        yield f"{path}: CUDA sources live in kernels/"
    if path.suffix not in (".cu", ".cuh") and (found := LAUNCH.search(code)):
        yield f"{path}:{line(found)}: only .cu files launch kernels"
    if (
        in_library
        and folder != "testing"
        and not is_test(path)
        and (found := PRINT_OR_EXIT.search(code))
    ):
        yield f"{path}:{line(found)}: the library neither prints nor exits, but this says {found.group(0).rstrip('( ')}"
    if path.suffix == ".h":
        opening = re.match(r"(?:[ \t]*//[^\n]*\n)+", text)
        said = opening.group(0) if opening else ""
        missing = [
            word
            for word in ("In", "Out", "Next")
            if not re.search(rf"^\s*//.*\b{word}:", said, re.M)
        ]
        if missing:
            yield f"{path}:1: a header opens with a comment that says {', '.join(word + ':' for word in missing)}"
        if "#pragma once" not in text:
            yield f"{path}:1: a header has #pragma once"


def faults_of_names(path: pathlib.PurePath) -> Iterator[str]:
    for part in (*path.parts[:-1], path.stem):
        for word in part.split("_"):
            if word in FORBIDDEN_WORDS:
                yield f"{path}: {word!r} in a name says nothing about what it is for"


def faults_of_tree(root: pathlib.Path) -> list[str]:
    """All faults of the tree at root, in the order of paths."""
    faults = []
    folders = root / "mtraining"
    for folder in sorted(p for p in folders.iterdir() if p.is_dir()):
        if folder.name not in LEVELS and folder.name != "testing":
            faults.append(
                f"mtraining/{folder.name}: no level is given to this folder in checks/include_levels.py"
            )
    for top in ("mtraining", "cli", "bench"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SOURCE_SUFFIXES or not file.is_file():
                continue
            path = file.relative_to(root)
            faults += faults_of_names(path)
            faults += faults_of_file(root, path)
            if path.suffix in (".cc", ".cu") and not is_listed(root, path):
                faults.append(
                    f"{path}: no CMakeLists.txt names it, so it is neither compiled nor run"
                )
    return faults


def is_listed(root: pathlib.Path, path: pathlib.PurePath) -> bool:
    """Whether a CMakeLists.txt of the file's folder, or of one above, names the file."""
    for folder in path.parents:
        lists = root / folder / "CMakeLists.txt"
        if lists.is_file():
            text = re.sub(r"#.*", "", lists.read_text())
            if re.search(rf"(?<![\w/.]){re.escape(str(path.relative_to(folder)))}(?![\w/.])", text):
                return True
    return False


def main() -> int:
    root = pathlib.Path(__file__).resolve().parent.parent
    faults = faults_of_tree(root)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
