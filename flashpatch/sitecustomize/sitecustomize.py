"""The front door for places where Python reads no ``.pth`` file, such as ``pip install --target``.

``PYTHONPATH=<...>/flashpatch/sitecustomize python ...`` does what ``flashpatch.pth`` does, then runs the
``sitecustomize`` that Python would have run without this one. Errors of that module reach Python unchanged."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    """Start FlashPatch if asked to, from the copy this file belongs to when no other is installed."""
    if os.environ.get("FLASHPATCH", "") in ("", "0"):
        return
    if find_spec("flashpatch") is None:
        sys.path.append(os.path.dirname(os.path.dirname(_HERE)))
    from flashpatch.bootstrap import start

    start()


def _run_next() -> None:
    """Run the first ``sitecustomize`` behind this one on ``sys.path``, in this module's place."""
    behind = sys.path[sys.path.index(_HERE) + 1 :] if _HERE in sys.path else []
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


try:
    _start()
finally:
    _run_next()
