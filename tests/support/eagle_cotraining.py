"""What jobs of verl that train a drafter between rollouts have in common, whichever engine they roll out with."""

import json
from pathlib import Path
from typing import Any

from verl_job import metrics

STEPS = 14  # the trainer has the pauses between rollouts alone, of a second each


def notes(folder: Path) -> dict[int, dict[str, Any]]:
    """What each process wrote into its ledger row, by pid."""
    rows = [json.loads(path.read_text()) for path in (folder / "ledger").rglob("*.json")]
    return {row["pid"]: row["notes"] for row in rows if row.get("kind") == "row"}


def check_acceptance_rises(output: str) -> None:
    """A drafter that began as noise was replaced twice at least, and more of its drafts are accepted."""
    lengths = metrics(output, "eagle/acceptance_length")
    assert lengths[0] < 1.3 and sum(lengths[-3:]) / 3 > lengths[0] + 0.15, lengths
    assert metrics(output, "eagle/drafter_version")[-1] >= 2


def first_architectures(folder: Path) -> list[str]:
    """The model classes of the drafter that the job made."""
    return json.loads((folder / "saved" / "eagle" / "first" / "config.json").read_text())["architectures"]
