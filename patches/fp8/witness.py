"""Compare what an engine's own checker says of its weights, whenever it is asked, with what it said first of the same policy.

vLLM's is ``compute_weight_checksums`` (``/weight_checker``, from 0.32 on), SGLang's the action ``checksum`` of ``/weights_checker``.
It reads the tensors themselves, so it also sees what was written into them past FlashPatch and the engine's loaders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashpatch import ledger
from flashpatch.patches.fp8.update.events import listed


class Witness:
    """Follow the checker of one engine."""

    def __init__(self) -> None:
        self._version, self._first = -1, {}

    def heard(self, version: int, patch: str, ranks: Sequence[Mapping[str, str]]) -> None:
        """Note whether the checksums by tensor, of each rank, are those that came first under this version of the policy."""
        said = {(name, at): one for at, rank in enumerate(ranks) for name, one in rank.items()}
        if version != self._version:
            self._version, self._first = version, said
        changed = sorted({key[0] for key in {*said, *self._first} if said.get(key) != self._first.get(key)})
        ledger.note(witness=version)
        if changed:  # it stays in the row: what was answered meanwhile was not the policy's
            differs = f"the engine's own checksums have changed since it took policy version {version}: {listed(changed)}"
            ledger.note(witness_differs=f"[flashpatch: {patch}] {differs}")
        ledger.flush()  # SGLang ends its processes by SIGKILL
