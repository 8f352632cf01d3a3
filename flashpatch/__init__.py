"""FlashPatch: research patches for unmodified vLLM, SGLang and verl, checked and proven live.

>>> import flashpatch
>>> flashpatch.enable("fp8")        # or FLASHPATCH=fp8 in the environment
>>> print(flashpatch.status())

Importing this package imports nothing else, not even ``typing``; each name below is loaded when first used.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.api import disable as disable
    from flashpatch.api import enable as enable
    from flashpatch.api import patches as patches
    from flashpatch.api import status as status
    from flashpatch.errors import PatchError as PatchError
    from flashpatch.record import Contract as Contract
    from flashpatch.record import Family as Family
    from flashpatch.record import Option as Option
    from flashpatch.record import Patch as Patch
    from flashpatch.record import State as State

__version__ = "0.1.0"

_HOMES = {
    "enable": "api",
    "disable": "api",
    "status": "api",
    "PatchError": "errors",
    "Contract": "record",
    "Family": "record",
    "Option": "record",
    "Patch": "record",
    "State": "record",
}

__all__ = ["__version__", "patches", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name != "patches" and name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "patches":
        return import_module(f"{__name__}.patches")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Patches(type(sys)):  # type: ignore[misc]
    """The package ``flashpatch.patches``, which holds the families and, called, lists their patches by id."""

    def __call__(self) -> object:
        from flashpatch.api import patches

        return patches()


class _Package(type(sys)):  # type: ignore[misc]
    """This package. Importing ``flashpatch.patches`` binds that name here, where users expect a function."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "patches" and type(value) is type(sys):
            value.__class__ = _Patches
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
