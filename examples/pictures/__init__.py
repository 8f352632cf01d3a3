"""Draw the pictures of the examples, each from a small file of numbers.

An example writes the numbers that its picture shows as JSON, then draws them: ``finish({out: numbers})``. The key
``picture`` names the drawing. ``python examples/pictures FILE.json...`` draws from such files again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = dict[str, Any]
STYLE = Path(__file__).resolve().parents[1] / "flashpatch.mplstyle"

# What the key `picture` says: module and function.
DRAWINGS = {
    "reward and mismatch": ("jobs", "reward_and_mismatch"),
    "times of two jobs": ("jobs", "times"),
    "streamed training": ("streaming", "streamed_training"),
    "right answers": ("answers", "right_answers"),
    "acceptance by round": ("drift", "acceptance"),
    "arms by round": ("drift", "arms"),
    "speed by arm": ("drift", "speed"),
    "corrections": ("corrections", "corrections"),
    "reward by seconds": ("pace", "by_seconds"),
    "distances to a known target": ("exact", "distances"),
    "right answers of a language model": ("language_model", "right_answers"),
}


def figure(numbers: Numbers) -> Figure:
    """Draw numbers in the project's style.

    Raises ``ValueError`` where ``picture`` is none of `DRAWINGS`, ``ModuleNotFoundError`` without matplotlib.
    """
    name = numbers.get("picture")
    if name not in DRAWINGS:
        raise ValueError(f"no picture is called {name!r}: one of {', '.join(DRAWINGS)}")
    module, function = DRAWINGS[name]
    draw: Callable[[Numbers], Figure] = getattr(import_module(f"{__name__}.{module}"), function)
    import matplotlib.style

    with matplotlib.style.context(STYLE):
        return draw(numbers)


def save(numbers: Numbers, out: Path) -> None:
    """Draw numbers into a PNG that carries their digest (text chunk ``Numbers``) and no date."""
    figure(numbers).savefig(
        out, metadata={"Software": None, "Numbers": digest(numbers)}, pil_kwargs={"optimize": True}
    )


def digest(numbers: Numbers) -> str:
    """Tell numbers from others: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def finish(pictures: dict[Path, Numbers]) -> None:
    """Write the numbers of each picture beside it as JSON, and draw them; without matplotlib, say how to get it."""
    files = {out: out.with_suffix(".json") for out in pictures}
    for out, numbers in pictures.items():
        files[out].write_text(_lines(_rounded(numbers)))
    try:
        for out, file in files.items():
            save(json.loads(file.read_text()), out)
            print(f"   {out}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        again = " ".join(["python", str(Path(__file__).parent), *map(str, files.values())])
        print(f"   no picture, as matplotlib is missing: pip install 'flashpatch[plot]', then {again}")


def _rounded(value: Any) -> Any:
    """The same with six significant digits per number."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _lines(value: Any, indent: int = 0) -> str:
    """JSON with a line per list of plain values."""
    if isinstance(value, dict) and value:
        pad = " " * (indent + 1)
        parts = (f"{pad}{json.dumps(str(name))}: {_lines(part, indent + 1)}" for name, part in value.items())
        text = "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    else:
        text = json.dumps(value)
    return text if indent else text + "\n"
