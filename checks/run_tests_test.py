"""The counting of test cases: nothing that failed may be lost."""

import json

import run_tests


def gtest_json(path, *cases):
    path.write_text(
        json.dumps({"testsuites": [{"name": "S", "testsuite": list(cases)}] if cases else []})
    )
    return path


PASS = {"name": "A", "status": "RUN", "result": "COMPLETED"}
FAIL = {"name": "B", "status": "RUN", "result": "COMPLETED", "failures": [{"failure": "x"}]}
SKIP = {"name": "C", "status": "RUN", "result": "SKIPPED"}
OFF = {"name": "DISABLED_D", "status": "NOTRUN", "result": "SUPPRESSED"}


def counts_of(ok, path):
    counts = run_tests.Counts()
    run_tests.count_gtest(counts, "layout_test", ok, path)
    return counts.line()


def test_cases_are_counted(tmp_path):
    assert (
        counts_of(False, gtest_json(tmp_path / "a.json", PASS, PASS, FAIL, SKIP, OFF))
        == "2 passed, 1 failed, 2 skipped"
    )


def test_crash_counts_as_a_failure(tmp_path):
    assert counts_of(False, tmp_path / "absent.json") == "0 passed, 1 failed"


def test_failure_outside_the_cases_counts(tmp_path):
    assert counts_of(False, gtest_json(tmp_path / "a.json", PASS)) == "1 passed, 1 failed"


def test_binary_without_cases_fails(tmp_path):
    assert counts_of(True, gtest_json(tmp_path / "a.json")) == "0 passed, 1 failed"


def test_pytest_report_is_counted(tmp_path):
    report = tmp_path / "pytest.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='m' name='a'/><testcase classname='m' name='b'><failure/></testcase>"
        "<testcase classname='m' name='c'><skipped/></testcase><testcase classname='m' name='d'><error/></testcase></testsuite></testsuites>"
    )
    counts = run_tests.Counts()
    run_tests.count_pytest(counts, 1, report)
    assert counts.line() == "1 passed, 2 failed, 1 skipped"


def test_pytest_that_did_not_start_fails(tmp_path):
    counts = run_tests.Counts()
    run_tests.count_pytest(counts, 4, tmp_path / "absent.xml")
    assert counts.line() == "0 passed, 1 failed"
    run_tests.count_pytest(counts, 5, tmp_path / "absent.xml")
    assert counts.line() == "0 passed, 1 failed"
