"""What stands in the place of every function: something that says what it is when it is called."""

import enum
from collections.abc import Callable

InterpolationMode = enum.Enum(
    "InterpolationMode",
    {name: name.lower() for name in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")}
    | {"NEAREST_EXACT": "nearest-exact"},
)


def function(name: str) -> Callable[..., None]:
    """A function of this name that cannot be used."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"this is a stand-in: torchvision's {name} is not here")

    absent.__name__ = name
    return absent
