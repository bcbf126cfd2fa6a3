"""Checks README.md's walk table: each folder it names exists, and each folder of mtraining/ is in it."""

import pathlib
import re
import sys

ROW = re.compile(r"^\|[^|]*?`([\w/]+)/`[^|]*\|", re.M)


def faults_of_table(root: pathlib.Path) -> list[str]:
    named = ROW.findall((root / "README.md").read_text())
    faults = [
        f"README.md: the walk table names {name}/, which does not exist"
        for name in named
        if not (root / name).is_dir()
    ]
    for folder in sorted(p for p in (root / "mtraining").iterdir() if p.is_dir()):
        if f"mtraining/{folder.name}" not in named:
            faults.append(f"README.md: the walk table lacks mtraining/{folder.name}/")
    return faults


def main() -> int:
    faults = faults_of_table(pathlib.Path(__file__).resolve().parent.parent)
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
