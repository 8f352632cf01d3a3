"""The drawings of `examples/pictures`, imported as an example's script does, and what is read off a picture."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tree import TREE


@contextmanager
def imported() -> Iterator[ModuleType]:
    """Have the package `pictures` on the import path, and forget it afterwards."""
    sys.path.append(str(TREE / "examples"))
    try:
        import pictures

        yield pictures
    finally:
        sys.path.remove(str(TREE / "examples"))
        for module in [name for name in sys.modules if name.partition(".")[0] == "pictures"]:
            del sys.modules[module]


def png_text(path: Path) -> dict[str, str]:
    """The text chunks of a PNG."""
    from PIL import Image  # which matplotlib needs too

    with Image.open(path) as image:
        return image.text
