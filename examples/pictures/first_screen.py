"""Draw the two charts at the top of README as SVG, light and dark: ``python examples/pictures/first_screen.py``.

The numbers are those of docs/images/data/first_screen.toml, which says where each was measured.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
NUMBERS = IMAGES / "data" / "first_screen.toml"
WIDTH = 420
LEFT, RIGHT = 16, 404
BAR = 18

#: Colours on light and on dark pages; each text has a contrast of 4.5 at least.
THEMES = {
    "light": {
        "back": "#f6f8fa",
        "text": "#1f2328",
        "soft": "#59636e",
        "stock": "#818b98",
        "ours": "#0969da",
        "bad": "#cf222e",
    },
    "dark": {
        "back": "#161b22",
        "text": "#e6edf3",
        "soft": "#9198a1",
        "stock": "#6e7681",
        "ours": "#58a6ff",
        "bad": "#ff7b72",
    },
}


def main() -> None:
    """Write each chart for each theme."""
    for name, text in charts(tomllib.loads(NUMBERS.read_text())).items():
        (IMAGES / name).write_text(text)
        print(IMAGES / name)


def charts(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file by its name."""
    drawn = {}
    for theme, colours in THEMES.items():
        drawn[f"first-speed-{theme}.svg"] = speed(numbers["speed"], colours)
        drawn[f"first-error-{theme}.svg"] = error(numbers["error"], colours)
    return drawn


def speed(measured: dict[str, list[int]], colours: dict[str, str]) -> str:
    """Draw tokens per second by batch, each pair of bars relative to stock's."""
    rows = list(zip(measured["batch"], measured["stock"], measured["flashpatch"], strict=True))
    unit = 200 / max(ours / stock for _, stock, ours in rows)
    parts, y = [], 78
    for batch, stock, ours in rows:
        parts.append(_text(LEFT, y + 22, f"batch {batch}", colours["text"]))
        for at, (value, colour) in enumerate(((stock, "stock"), (ours, "ours"))):
            length, top = value / stock * unit, y + at * (BAR + 2)
            parts.append(_bar(96, top, length, colours[colour]))
            times = f" ({value / stock:.2f} x)" if at else ""
            parts.append(_text(102 + length, top + 14, f"{value:,}{times}", colours["text"]))
        y += 2 * BAR + 20
    said = "Tokens per second on one H200, Qwen2.5-7B's shapes: " + "; ".join(
        f"batch {batch}: stock bf16 {stock:,}, FlashPatch fp8 {ours:,}" for batch, stock, ours in rows
    )
    legend = "stock vLLM, bf16", "FlashPatch, fp8"
    return _page("Rollout: tokens per second (more is better)", legend, parts, said, colours)


def error(rows: list[dict[str, Any]], colours: dict[str, str]) -> str:
    """Draw how far answers are off after a sync, and say what an error or a refusal was."""
    unit = 145 / max(row.get("stock", 0) for row in rows)
    parts, y = [], 74
    for row in rows:
        parts.append(_text(LEFT, y, row["what"], colours["soft"], 13))
        length = row.get("stock", 0) * unit
        wrong = row.get("stock") != 0
        parts.append(_bar(LEFT, y + 6, max(length, 3), colours["bad" if wrong else "stock"]))
        parts.append(
            _text(LEFT + max(length, 3) + 6, y + 20, row["stock_says"], colours["bad" if wrong else "text"])
        )
        parts.append(_bar(276, y + 6, 3, colours["ours"]))
        parts.append(_text(285, y + 20, row["flashpatch_says"], colours["text"]))
        y += 42
    said = "Largest error of a log-probability after a weight sync, in nats: " + "; ".join(
        f"{row['what']}: stock {row['stock_says']}, FlashPatch {row['flashpatch_says']}" for row in rows
    )
    return _page(
        "Error after a weight sync, nats (0 is exact)", ("stock vLLM", "FlashPatch"), parts, said, colours
    )


def _page(title: str, legend: tuple[str, str], parts: list[str], said: str, colours: dict[str, str]) -> str:
    """Return a chart with its title, its legend and a description for those who do not see it."""
    head = [_text(LEFT, 26, title, colours["text"], 16, "600")]
    for x, key, label in ((LEFT, "stock", legend[0]), (210, "ours", legend[1])):
        head += [_bar(x, 40, 12, colours[key], 12), _text(x + 18, 51, label, colours["soft"])]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 244" width="{WIDTH}" height="244"'
            f' role="img" font-family="system-ui, sans-serif"><title>{escape(said)}</title>',
            f'<rect width="{WIDTH}" height="244" rx="8" fill="{colours["back"]}"/>',
            *head,
            *parts,
            "</svg>\n",
        ]
    )


def _bar(x: float, y: float, width: float, colour: str, height: int = BAR) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height}" rx="2" fill="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str, size: int = 14, weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
