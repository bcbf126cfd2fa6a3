"""`python -m mtraining VERB ..` is the executable `mtraining VERB ..`, so that `torchrun -m mtraining train ..` works.

In:   MTRAINING_BINARY (a file), MTRAINING_BINARY_DIR (a build folder), build/<preset>/bin of a checkout. Out: this process becomes
the executable: same arguments, environment and exit code. Next: cli/main.cc.
"""

import os
import pathlib
import sys


def candidates() -> list[pathlib.Path]:
    """Files to try, best first; of a checkout's builds the newer one."""
    if named := os.environ.get("MTRAINING_BINARY"):
        return [pathlib.Path(named)]
    if build := os.environ.get("MTRAINING_BINARY_DIR"):
        return [pathlib.Path(build) / "bin/mtraining"]
    checkout = pathlib.Path(__file__).resolve().parents[2]
    built = [checkout / "build" / preset / "bin/mtraining" for preset in ("cuda", "cpu")]
    return sorted(built, key=lambda p: p.stat().st_mtime if p.is_file() else 0, reverse=True)


def main() -> int:
    """Never returns where an executable is found; else says what to do and gives 2."""
    tried = candidates()
    for path in tried:
        if path.is_file():
            os.execv(path, [str(path), *sys.argv[1:]])
    looked = ", ".join(str(p) for p in tried)
    print(
        f"mtraining: error: the executable is not built: run ./dev build in the checkout, or name the file in MTRAINING_BINARY "
        f"(looked for {looked})",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
