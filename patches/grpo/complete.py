"""Balancing of complete batches is verl's; the streaming batcher has no place there."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch

BALANCING = "verl.utils.seqlen_balancing"


def native(site: Any) -> str | None:
    """verl's own, when it divides an easy case perfectly."""
    lengths = [7, 5, 5, 4, 3, 3, 2, 1]
    parts = site.original(lengths, 3, False)
    sums = [sum(lengths[item] for item in part) for part in parts]
    return f"verl's {site.name}" if sums == [10, 10, 10] else None


def on_partitions(original, seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Instead of ``get_seqlen_balanced_partitions``, should it ever go wrong."""
    from flashpatch.patches.grpo.standalone.partition import balance

    if equal_size:
        return original(seqlen_list, k_partitions, equal_size)
    return [sorted(part) for part in balance(seqlen_list, k_partitions)]


PATCH = Patch(
    id="grpo.verl.balancing",
    targets=(f"{BALANCING}:get_seqlen_balanced_partitions",),
    requires="verl>=0.9",
    wrapper=on_partitions,
    native=native,
    contract=Contract(
        params=("seqlen_list", "k_partitions", "equal_size"), exists=(f"{BALANCING}:karmarkar_karp",)
    ),
    evidence="optional",
    scope=frozenset({"trainer", "driver"}),
    tested=("0.9.1",),
    why="A batch that is complete can be divided better than one that streams; verl does so already.",
    how="Stands aside for verl's Karmarkar-Karp balancing.",
    remove_when="verl hands samples to ranks before a batch is complete; then the streaming batcher has "
    "a door.",
)
