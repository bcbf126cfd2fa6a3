"""README's walk table and the tree agree, and the check sees when they do not."""

import pathlib

import readme_walk


def test_faults_are_found(tmp_path):
    (tmp_path / "mtraining/layout").mkdir(parents=True)
    (tmp_path / "mtraining/ring").mkdir()
    (tmp_path / "README.md").write_text(
        "| folder | In |\n| `mtraining/layout/` | x |\n| 2 `mtraining/gone/` | x |\n"
    )
    assert readme_walk.faults_of_table(tmp_path) == [
        "README.md: the walk table names mtraining/gone/, which does not exist",
        "README.md: the walk table lacks mtraining/ring/",
    ]


def test_this_tree_has_no_fault():
    assert readme_walk.faults_of_table(pathlib.Path(__file__).resolve().parent.parent) == []
