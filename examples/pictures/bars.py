"""Draw the bars at the top of "measured" pages as SVG, light and dark: ``python examples/pictures/bars.py``.

The numbers are those of docs/images/data/bars.toml, which says what a row is; each stands on the page, too.
"""

from __future__ import annotations

import tomllib
from html import escape
from typing import Any

from first_screen import IMAGES, LEFT, RIGHT, THEMES, WIDTH, _bar, _text

NUMBERS = IMAGES / "data" / "bars.toml"
TOP, ROW, BAR, LETTER = 46, 24, 14, 7


def main() -> None:
    """Write each chart for each theme."""
    for name, text in charts(tomllib.loads(NUMBERS.read_text())).items():
        (IMAGES / name).write_text(text)
        print(IMAGES / name)


def charts(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file by its name."""
    return {
        f"bars-{page}-{theme}.svg": chart(one, colours)
        for page, one in numbers.items()
        for theme, colours in THEMES.items()
    }


def chart(one: dict[str, Any], colours: dict[str, str]) -> str:
    """Draw a bar per row from ``low`` to ``high``, its name to the left and what it says to the right."""
    rows = one["rows"]
    start = LEFT + LETTER * max(len(name) for name, *_ in rows) + 8
    room = RIGHT - start - LETTER * max(len(says) for *_, says in rows) - 8
    unit = room / max(high for _, _, high, _ in rows)
    height = TOP + ROW * len(rows) + 8
    said = f"{one['title']}: " + "; ".join(f"{name} {says}" for name, _, _, says in rows)
    parts = [_text(LEFT, 26, one["title"], colours["text"], 15, "600")]
    for at, (name, low, high, says) in enumerate(rows):
        y = TOP + ROW * at
        colour = colours["stock" if one.get("stock", "\0") in name else "ours"]
        parts.append(_text(LEFT, y + 12, name, colours["text"], 13))
        parts.append(_bar(start + low * unit, y, max((high - low) * unit, 2), colour, BAR))
        parts.append(_text(start + max(high * unit, 2) + 6, y + 12, says, colours["soft"], 13))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img" font-family="system-ui, sans-serif"><title>{escape(said)}</title>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours["back"]}"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
