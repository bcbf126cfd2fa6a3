"""The include check finds each kind of fault, and this tree has none."""

import pathlib

import include_levels
import pytest

HEADER = "// What it is.\n// In: a. Out: b. Next: c.\n#pragma once\n"


def tree(root: pathlib.Path, files: dict[str, str]) -> list[str]:
    for name in ("mtraining", "cli", "bench"):
        (root / name).mkdir()
    sources: dict[pathlib.Path, list[str]] = {}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix in (".cc", ".cu"):
            sources.setdefault(path.parent, []).append(path.name)
    for folder, names in sources.items():
        (folder / "CMakeLists.txt").write_text(f"mt_library(x SOURCES {' '.join(names)})\n")
    return include_levels.faults_of_tree(root)


def test_allowed_includes_pass(tmp_path):
    assert not tree(
        tmp_path,
        {
            "mtraining/base/check.h": HEADER,
            "mtraining/layout/layout.h": HEADER
            + '#include <vector>\n#include "mtraining/base/check.h"\n',
            "mtraining/testing/oracle.h": HEADER + '#include "mtraining/layout/layout.h"\n',
            "mtraining/layout/layout_test.cc": '#include "mtraining/testing/oracle.h"\n',
            "mtraining/comm/c10d.cc": "#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>\n",
            "mtraining/model/decoder.cc": '#include <ATen/ATen.h>\n// printf( and <<< in a comment\nauto s = "TORCH_LIBRARY(";\n',
            "mtraining/train/t.cc": "void T::exit() { transport.abort(1); snprintf(b, 1, x); }\n",
            "mtraining/torch_ops/ops.cc": "TORCH_LIBRARY(mtraining, m) {}\n",
            "mtraining/kernels/merge.cu": "void f() { k<<<1, 1>>>(); }\n",
            "cli/main.cc": '#include "mtraining/layout/layout.h"\nint main() { printf("x"); }\n',
            "bench/b.h": HEADER,
            "cli/b.cc": '#include "bench/b.h"\n',
        },
    )


BASE = {"mtraining/base/check.h": HEADER}
FAULTS = {
    "upwards": (
        {"mtraining/ring/r.h": HEADER, "mtraining/layout/l.cc": '#include "mtraining/ring/r.h"\n'},
        "may not include ring/",
    ),
    "same level": (
        {"mtraining/ring/r.h": HEADER, "mtraining/index/i.cc": '#include "mtraining/ring/r.h"\n'},
        "may not include ring/",
    ),
    "kernels": (
        {
            "mtraining/layout/l.h": HEADER,
            "mtraining/kernels/k.cc": '#include "mtraining/layout/l.h"\n',
        },
        "may not include layout/",
    ),
    "kernels torch": (
        {"mtraining/kernels/k.cu": "#include <ATen/ATen.h>\n"},
        "builds without torch",
    ),
    "sim torch": ({"mtraining/sim/s.cc": "#include <torch/torch.h>\n"}, "builds without torch"),
    "comm torch": (
        {"mtraining/comm/loopback.cc": "#include <c10/util/Exception.h>\n"},
        "builds without torch",
    ),
    "c10d": (
        {"mtraining/train/t.cc": "#include <torch/csrc/distributed/c10d/Work.hpp>\n"},
        "only comm/c10d*",
    ),
    "testing": (
        {
            "mtraining/testing/o.h": HEADER,
            "mtraining/train/t.cc": '#include "mtraining/testing/o.h"\n',
        },
        "tests and benches only",
    ),
    "test too high": (
        {
            "mtraining/model/m.h": HEADER,
            "mtraining/kernels/k_test.cc": '#include "mtraining/model/m.h"\n',
        },
        "may not include model/",
    ),
    "testing too high": (
        {
            "mtraining/model/m.h": HEADER,
            "mtraining/testing/o.cc": '#include "mtraining/model/m.h"\n',
        },
        "may not include model/",
    ),
    "cli included by bench": (
        {"cli/c.h": HEADER, "bench/b.cc": '#include "cli/c.h"\n'},
        "nothing includes cli/",
    ),
    "bench included by a library": (
        {"bench/b.h": HEADER, "mtraining/train/t.cc": '#include "bench/b.h"\n'},
        "nothing includes bench/",
    ),
    "cli included": (
        {"cli/c.h": HEADER, "mtraining/train/t.cc": '#include "cli/c.h"\n'},
        "nothing includes cli/",
    ),
    "relative": ({"mtraining/base/b.cc": '#include "check.h"\n'}, "from the root"),
    "angle": ({"mtraining/base/b.cc": "#include <mtraining/base/check.h>\n"}, "expected #include"),
    "absent": ({"mtraining/base/b.cc": '#include "mtraining/base/none.h"\n'}, "does not exist"),
    "registration": (
        {"mtraining/model/m.cc": "TORCH_LIBRARY_IMPL(mtraining, CPU, m) {}\n"},
        "only torch_ops/",
    ),
    "cu elsewhere": ({"mtraining/model/m.cu": "\n"}, "CUDA sources live in kernels/"),
    "launch": (
        {"mtraining/kernels/k.cc": "void f() { k<<<1, 1>>>(); }\n"},
        "only .cu files launch",
    ),
    "print": (
        {"mtraining/train/t.cc": 'void f() { std::printf("x"); }\n'},
        "neither prints nor exits",
    ),
    "exit": ({"mtraining/train/t.cc": "void f() { exit(1); }\n"}, "neither prints nor exits"),
    "no opening": (
        {"mtraining/base/b.h": "#pragma once\n// In: Out: Next:\n"},
        "opens with a comment that says In:, Out:, Next:",
    ),
    "no pragma": ({"mtraining/base/b.h": "// In: Out: Next:\n"}, "#pragma once"),
    "word in file": ({"mtraining/base/string_utils.cc": "\n"}, "'utils' in a name"),
    "word in folder": ({"mtraining/base/common/a.cc": "\n"}, "'common' in a name"),
    "folder": ({"mtraining/extras/a.cc": "\n"}, "no level is given"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(tmp_path, name):
    files, message = FAULTS[name]
    faults = tree(tmp_path, {**BASE, **files})
    assert any(message in fault for fault in faults), faults


def test_tests_may_include_what_testing_may(tmp_path):
    files = {
        "mtraining/index/i.h": HEADER,
        "mtraining/testing/o.h": HEADER,
        "mtraining/kernels/k_case.h": HEADER
        + '#include "mtraining/index/i.h"\n#include "mtraining/testing/o.h"\n',
    }
    assert tree(tmp_path, {**BASE, **files}) == []


def test_source_that_no_list_names_is_found(tmp_path):
    tree(tmp_path, {**BASE, "mtraining/base/a.cc": "\n"})
    (tmp_path / "mtraining/base/b_test.cc").write_text("\n")
    (tmp_path / "mtraining/base/CMakeLists.txt").write_text(
        "mt_library(base SOURCES a.cc)  # b_test.cc\nmt_test(x SOURCES ab_test.cc)\n"
    )
    assert include_levels.faults_of_tree(tmp_path) == [
        "mtraining/base/b_test.cc: no CMakeLists.txt names it, so it is neither compiled nor run"
    ]


def test_line_number_is_that_of_the_include(tmp_path):
    faults = tree(
        tmp_path, {**BASE, "mtraining/sim/s.cc": "/* a\n b */\n\n#include <ATen/ATen.h>\n"}
    )
    assert faults == ["mtraining/sim/s.cc:4: sim/ builds without torch, but includes ATen/ATen.h"]


def test_this_tree_has_no_fault():
    assert include_levels.faults_of_tree(pathlib.Path(__file__).resolve().parent.parent) == []
