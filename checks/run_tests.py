"""Runs ctest and pytest and counts test cases: the last line is `N passed, N failed` (and `, N skipped` if any).

A gtest binary is one ctest test (see cmake/MtTargets.cmake); its cases are counted from the JSON file it leaves. A binary that fails
without naming a failed case (a crash, a leak, a time-out) counts as one failed case. No case at all is a failure.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def fail(self, name: str) -> None:
        self.failed += 1
        self.failures.append(name)

    def line(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


def count_gtest(counts: Counts, name: str, ok: bool, results: pathlib.Path) -> None:
    """Adds the cases of one ctest test; results is the JSON file that the binary leaves when it is a gtest binary that came to its end."""
    if not results.is_file():
        if ok:
            counts.passed += 1  # a ctest test that is no gtest binary
        else:
            counts.fail(f"{name} (no results: crashed, timed out or was not built)")
        return
    before = counts.failed
    cases = [
        case | {"suite": suite["name"]}
        for suite in json.loads(results.read_text())["testsuites"]
        for case in suite["testsuite"]
    ]
    for case in cases:
        if case.get("failures"):
            counts.fail(f"{name}: {case['suite']}.{case['name']}")
        elif case.get("result") == "SKIPPED" or case.get("status") == "NOTRUN":
            counts.skipped += 1
        else:
            counts.passed += 1
    if not cases:
        counts.fail(f"{name} (no case)")
    elif not ok and counts.failed == before:
        counts.fail(f"{name} (failed outside its cases)")


def run_ctest(counts: Counts, build: pathlib.Path, jobs: int, regex: str) -> None:
    report = build / "test-results/ctest.xml"
    command = [
        "ctest",
        "--test-dir",
        str(build),
        "--parallel",
        str(jobs),
        "--output-on-failure",
        "--no-tests=ignore",
    ]
    command += ["--output-junit", str(report.resolve())]
    if regex:
        command += ["--tests-regex", regex]
    gpus = count_gpus()
    left_out = [] if gpus > 1 else ["multi_gpu"] if gpus else ["cuda", "multi_gpu"]
    if left_out:
        command += ["--label-exclude", f"^({'|'.join(left_out)})$"]
        print(
            f"==> {gpus} GPU(s) here: tests labelled {' and '.join(left_out)} are left out",
            flush=True,
        )
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.is_file():
        counts.fail(f"ctest (exit {code}, no report)")
        return
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name")
        count_gtest(counts, name, case.get("status") == "run", build / f"test-results/{name}.json")


def count_gpus() -> int:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return 0
    return len(re.findall(r"^GPU \d+", listing, re.M))


def run_pytest(counts: Counts, build: pathlib.Path, regex: str) -> None:
    report = build / "test-results/pytest.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    if regex:
        files = sorted(
            p
            for top in ("python", "checks")
            for p in (ROOT / top).rglob("*.py")
            if re.search("(^test_|_test$)", p.stem)
        )
        files = [
            str(p.relative_to(ROOT)) for p in files if re.search(regex, str(p.relative_to(ROOT)))
        ]
        if not files:
            return
        command += files
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    count_pytest(counts, code, report)


def count_pytest(counts: Counts, code: int, report: pathlib.Path) -> None:
    before = counts.failed
    if report.is_file():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                counts.fail(f"{case.get('classname')}::{case.get('name')}")
            elif case.find("skipped") is not None:
                counts.skipped += 1
            else:
                counts.passed += 1
    if code not in (0, 5) and counts.failed == before:  # 5: no test collected
        counts.fail(f"pytest (exit {code})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("regex", nargs="?", default="", help="only tests whose name matches")
    options = parser.parse_args()
    counts = Counts()
    run_ctest(counts, options.build, options.jobs, options.regex)
    run_pytest(counts, options.build, options.regex)
    for name in counts.failures:
        print(f"FAILED {name}")
    if counts.passed + counts.failed == 0:
        print("no test ran")
    print(counts.line(), flush=True)
    return 1 if counts.failed or counts.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
