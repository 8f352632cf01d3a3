"""Name what a pickle would import and call, by reading its instructions; nothing of it is executed."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

from flashpatch.patches.fp8.calibration import untrusted

LIMIT = 64 * untrusted.MIB
PLAIN = ("torch.", "collections.OrderedDict")
"""What the file of a plain dictionary of tensors imports, by its start."""
_STRINGS = {
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def suspicious(path: Path) -> list[str]:
    """Return what a pickle imports and plain data does not, such as ``posix.system``.

    Args:
        path: a file of ``torch.save``, or a bare pickle.

    Returns:
        Names in the order of appearance; empty where there are none, or where it is no pickle. What reads the
        file must be safe by itself: this only says why it is refused.
    """
    found = dict.fromkeys(name for data in _pickles(path) for name in _imports(data))
    return [name for name in found if not name.startswith(PLAIN)]


def _pickles(path: Path) -> Iterator[bytes]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if entry.filename.endswith(".pkl") and entry.compress_type == zipfile.ZIP_STORED:
                        with archive.open(entry) as file:
                            yield file.read(LIMIT)
        else:
            with path.open("rb") as file:
                yield file.read(LIMIT)
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError, EOFError, NotImplementedError):
        return


def _imports(data: bytes) -> Iterator[str]:
    memo: dict[int, str] = {}
    strings: list[str] = []
    stored = 0
    try:
        for operation, argument, _ in pickletools.genops(data):
            name = operation.name
            if name in ("GLOBAL", "INST"):
                yield str(argument).replace(" ", ".", 1)
            elif name == "STACK_GLOBAL":
                yield ".".join(strings[-2:])
            elif name.startswith("EXT"):
                yield f"copyreg extension {argument}"
            elif name in _STRINGS:
                strings.append(str(argument))
            elif name in _PUT:
                key = stored if name == "MEMOIZE" else int(argument)
                stored += name == "MEMOIZE"
                memo[key] = strings[-1] if strings else ""
            elif name in _GET and int(argument) in memo:
                strings.append(memo[int(argument)])
            del strings[:-2]
    except Exception:  # whatever the bytes do to the reader of instructions, they are no reason to fail here
        return
