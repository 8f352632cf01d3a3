"""FlashPatch: research patches for unmodified vLLM, SGLang and verl, checked and proven live.

>>> import flashpatch
>>> flashpatch.enable("fp8")        # or FLASHPATCH=fp8 in the environment
>>> print(flashpatch.status())

Importing this package imports nothing else, not even ``typing``; each name below is loaded when first used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.api import checksum as checksum
    from flashpatch.api import disable as disable
    from flashpatch.api import enable as enable
    from flashpatch.api import list_patches as list_patches
    from flashpatch.api import status as status
    from flashpatch.decorate import Patches as Patches
    from flashpatch.decorate import collected as collected
    from flashpatch.errors import PatchError as PatchError
    from flashpatch.record import Contract as Contract
    from flashpatch.record import Family as Family
    from flashpatch.record import Option as Option
    from flashpatch.record import Patch as Patch
    from flashpatch.record import State as State

__version__ = "0.2.0"

_HOMES = {
    "enable": "api",
    "checksum": "api",
    "disable": "api",
    "list_patches": "api",
    "status": "api",
    "Patches": "decorate",
    "collected": "decorate",
    "PatchError": "errors",
    "Contract": "record",
    "Family": "record",
    "Option": "record",
    "Patch": "record",
    "State": "record",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


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
