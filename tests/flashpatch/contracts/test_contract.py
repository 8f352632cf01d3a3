"""What a contract promises, and how its breach is reported."""

import pytest

from flashpatch.contracts.contract import check, installed_root
from flashpatch.contracts.source import Sources

UPDATE = '''
    """Module docstring."""

    def update(self, weights: list, *, strict=True):
        """Docstring."""
        from toy.tools import prepare as ready
        model = self.runner.get_model()
        return model.load_weights(ready(weights), strict=strict)
'''


@pytest.mark.parametrize(
    "name", ["self.runner", "self.runner.get_model", "load_weights", "model.load_weights", "prepare", "ready"]
)
def test_mentions_in_the_body_hold(write, checked, name):
    write(toy={"worker": UPDATE})
    assert checked("toy.worker:update", mentions=(name,)).ok


def test_a_mention_elsewhere_is_none(write, checked):
    write(toy={"worker": UPDATE})
    result = checked("toy.worker:update", mentions=("self.model", "list", "weights"))
    assert result.drift == (
        "toy.worker:update no longer mentions self.model (toy/worker.py:3); "
        "toy.worker:update no longer mentions list (toy/worker.py:3)"
    )


def test_every_breach_is_listed_and_the_first_line_is_given(write, checked):
    write(toy={"worker": UPDATE, "tools": "x = 1"})
    result = checked("toy.worker:update", params=("buckets",), exists=("toy.tools:prepare",))
    assert result.line == "toy/worker.py:3"
    assert "no longer takes 'buckets' (toy/worker.py:3)" in result.drift
    assert "toy.tools:prepare is gone: no 'prepare' (toy/tools.py:1)" in result.drift


def test_installed_root_finds_without_importing(write, monkeypatch):
    root = write(toy_installed={"__init__": "raise AssertionError('imported')"})
    (root / "toy_file.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(root))
    assert installed_root("toy_installed") == root / "toy_installed"
    assert installed_root("toy_file") == root / "toy_file.py"
    assert installed_root("toy_absent") is None
    assert installed_root("sys") is None


def test_a_one_file_package_is_checked(toy_patch, tmp_path):
    (tmp_path / "single.py").write_text("def f(a): ...\n")
    result = check(toy_patch("single:f", params=("a",)), Sources(lambda package: tmp_path / "single.py"))
    assert (result.ok, result.line) == (True, "single.py:1")


def test_what_older_versions_have_not_must_be_there_from_its_first_version_on(write, checked):
    write(toy={"worker": UPDATE, "tools": "x = 1"})
    asked = dict(since={"2.0": ("toy.tools:prepare",)})
    assert checked("toy.worker:update", version="1.9", **asked).ok
    gone = "toy.tools:prepare is gone: no 'prepare' (toy/tools.py:1)"
    for version in ("2.0", "2.1rc1", "unknown", None):
        assert checked("toy.worker:update", version=version, **asked).drift == gone
