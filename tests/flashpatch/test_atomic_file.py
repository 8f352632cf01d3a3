"""A file is replaced as a whole or left as it was."""

import os

import pytest

from flashpatch.patches._shared.atomic_file import replacing


def test_the_content_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == tmp_path and temporary.name.startswith(".")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, error):
    path = tmp_path / "state.json"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.json"]


def test_a_file_that_cannot_be_moved_is_an_error_and_leaves_nothing(tmp_path):
    path = tmp_path / "taken"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError), replacing(path) as temporary:
        temporary.write_text("new")
    assert os.listdir(tmp_path) == ["taken"]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "unwritten"):
        pass
