"""Draw the shares of the causes that a certificate has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flashpatch.verify.exact.certificate import Certificate


def missing() -> str:
    """Say what is missing for a picture; "" if nothing is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--picture needs matplotlib: pip install 'flashpatch[plot]'"
    return ""


def draw(found: Certificate, path: Path) -> None:
    """Write a bar per cause that could be switched: the part of the mean KL that went with it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    causes = [cause for cause in found.causes if cause.share is not None]
    shares = [max(cause.share, -1) for cause in causes]  # a longer bar would hide the others
    made = Figure(figsize=(9, 1.5 + 0.4 * len(causes)), layout="constrained")
    axes = made.subplots()
    bars = axes.barh([f"{cause.name}: {cause.to}" for cause in causes], shares)
    axes.bar_label(bars, [cause.part for cause in causes], padding=3)
    axes.margins(x=0.15)  # for the labels
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("part of the mean KL that goes with the cause; below 0 the mean KL grows")
    made.suptitle(
        f"Mean KL of engine and trainer: {found.kl:.1e} nats, by rounding alone {found.kl_rounding:.1e}"
    )
    made.savefig(path, dpi=150)
