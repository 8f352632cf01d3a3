"""FlashPatch: research patches for unmodified vLLM, SGLang and verl, checked and proven live.

>>> import flashpatch
>>> flashpatch.enable("fp8")        # or FLASHPATCH=fp8 in the environment
>>> print(flashpatch.status())

Importing this package imports nothing else, not even ``typing``; each name below is loaded when first used."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.api import checksum, disable, enable, list_patches, status
    from flashpatch.decorate import Patches, collected
    from flashpatch.errors import PatchError
    from flashpatch.patches.fp8.named_update import update
    from flashpatch.record import Contract, Family, Option, Patch, State

__version__ = "0.2.0"

__all__ = ["__version__", "enable", "checksum", "disable", "list_patches", "status", "Patches", "collected"]
__all__ += ["PatchError", "Contract", "Family", "Option", "Patch", "State", "update"]

_HOMES = {
    "api": ("enable", "checksum", "disable", "list_patches", "status"),
    "decorate": ("Patches", "collected"),
    "errors": ("PatchError",),
    "patches.fp8.named_update": ("update",),
    "record": ("Contract", "Family", "Option", "Patch", "State"),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if name != "patches" and home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "patches":
        return import_module(f"{__name__}.patches")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
