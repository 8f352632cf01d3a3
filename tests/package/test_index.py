"""The generated index says what the families say."""

from pathlib import Path

from flashpatch import _index, registry, write_index


def test_the_index_is_up_to_date() -> None:
    written = write_index.text(registry.built_in().values())
    assert Path(_index.__file__).read_text() == written, "run: python -m flashpatch.write_index"
