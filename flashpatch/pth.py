"""What ``flashpatch.pth`` calls: `flashpatch.bootstrap.start`, as soon as every ``.pth`` file has been read.

Earlier, directories that later files and later site-packages add are missing from ``sys.path``, and with them
perhaps our dependencies, a framework or patches of other packages. Python 3.15 waits by itself for ``.start`` files."""

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _EndOfSite:
    """A finder that sees `site` import ``sitecustomize``, which it does when it is done with paths."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "sitecustomize":
            return None
        sys.meta_path.remove(self)
        _start()
        return _find(name)  # by the other finders: the import under way skips one, now that we are gone


def start_after_site() -> None:
    """Start when `site` has finished with paths; at once when it has, and this is a later ``addsitedir``."""
    if hasattr(builtins, "quit"):  # the first thing that site does after the last path
        _start()
    else:
        sys.meta_path.insert(0, _EndOfSite())


def _find(name):  # type: ignore[no-untyped-def]
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, None, None) if find_spec is not None else None
        if spec is not None:
            return spec
    return None


def _start() -> None:
    """Report an error as Python does for a ``.pth`` file: printed, and the interpreter goes on. Ours are logged already."""
    from flashpatch.bootstrap import start

    try:
        start()
    except Exception as error:
        if type(error).__name__ != "PatchError":
            sys.excepthook(*sys.exc_info())
