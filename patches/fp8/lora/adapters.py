"""Hold the LoRA adapters of one engine's rank, and replace one as a transaction of all ranks.

An adapter is staged and checked on every rank, then put in place on every rank. If either fails on one, all keep the
adapter they had. Its identity is its content: a name that means something else than before is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.tally import count
from flashpatch.patches.fp8.update.events import Policy
from flashpatch.patches.fp8.update.ranks import Consensus

ID = "fp8.lora"
ROLE = "lora"
"""Role of the policy that a rank reports for its adapters."""

Names = tuple[str, int | str, str, str]


@dataclass(frozen=True)
class Adapter:
    """One adapter in place.

    Attributes:
        name, number, path: what requests call it, and where it came from; SGLang numbers by texts.
        version: of the adapters of this rank when it was put in place.
        digest: of its content, see `check.digest`.
        key: what the engine's caches know it by."""

    name: str
    number: int | str
    path: str
    version: int
    digest: str
    key: str


class Adapters:
    """The adapters of one rank.

    Args:
        consensus: agreement of the ranks that hold the model.

    Attributes:
        version: number of the last adapter that was put in place, the same on all ranks.
        meanings: how often a known name or number came to mean something else, by which what was cached under it is stale.
        held: by number.
        models: what the engine made of each that is held, by number; to be put in place again.
        error: why the adapters in place are not whole, empty if they are.
        asked: whether an adapter is being sent, not only named by a request.
        kept: numbers whose removal waits for their successor; None if removals are carried out."""

    def __init__(self, consensus: Consensus) -> None:
        self.consensus = consensus
        self.version = self.meanings = 0
        self.held: dict[int | str, Adapter] = {}
        self.models: dict[int | str, Any] = {}
        self.error = ""
        self.asked = False
        self.kept: set[int] | None = None
        # what caches know an adapter by -> its last digest, also after its removal
        self._contents: dict[str, str] = {}

    def policy(self) -> Policy:
        """Return what the scheduler must know: the state, and a version that changes as ``meanings`` does.

        A number whose content caches know as that of another number serves nobody: to them the two are one."""
        holds = {
            number: (one.name, one.path) if self._contents[one.key] == one.digest else None
            for number, one in self.held.items()
        }
        return Policy(ROLE, "broken" if self.error else "ready", self.meanings, error=self.error, holds=holds)

    def changes(self, names: Names, digest: str) -> bool:
        """Whether the number of ``names`` holds something else by now, or under another name or path."""
        before = self.held.get(names[1])
        return before is not None and (before.name, before.path, before.digest) != (
            names[0],
            names[2],
            digest,
        )

    def check_meaning(self, key: str, digest: str) -> None:
        """Raise if ``key`` has stood for another content, of which the engine may have cached prefixes."""
        if self._contents.get(key, digest) != digest:
            raise PatchError(
                f"the content of a LoRA adapter that the engine knows as {key} has changed, and a request brought it",
                patch=ID,
                advice="Send it by add_lora before any request names it, or give it another name and number.",
            )

    def replace(
        self, names: Names, stage: Callable[[], str], place: Callable[[], Any], restore: Callable[[], None]
    ) -> Any:
        """Stage an adapter, agree, put it in place, agree again; return what ``place`` gives.

        Args:
            names: name, number and path by which requests call it, and what the engine's caches know it by.
            stage: loads and checks it beside the one in place; returns its digest.
            place: puts it in place.
            restore: puts what was in place before back.

        Raises:
            PatchError: another rank could not take it. What ``stage`` and ``place`` raise is raised on."""
        name, number, path, key = names
        began = time.perf_counter()
        try:
            digest = self._agreed(stage)
            result = self._agreed(place, restore)
        except Exception as error:
            problem = error.problem if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
            self._tell(began, "abandoned", name, problem=problem, state=self.policy().state)
            count("updates_refused")
            raise
        self.version += 1
        self.error = ""
        if self.changes(names, digest) or self._contents.get(key, digest) != digest:
            self.meanings += 1
        self._contents[key] = digest
        self.held[number] = Adapter(name, number, path, self.version, digest, key)
        self._tell(began, "committed", name, version=self.version, digest=digest)
        ledger.note(adapter_version=self.version, adapters=self.digests())
        return result

    def keep_only(self, numbers: Collection[int | str]) -> None:
        """Note that adapters with other numbers are no longer held."""
        if gone := self.held.keys() - set(numbers):
            for number in gone:
                del self.held[number]
                self.models.pop(number, None)
            ledger.note(adapters=self.digests())

    def digests(self) -> dict[str, str]:
        """Return the digest of each adapter that is held, by name."""
        return {one.name: one.digest for one in self.held.values()}

    def _tell(self, began: float, outcome: str, name: str, **facts: object) -> None:
        seconds = round(time.perf_counter() - began, 6)
        ledger.event("update", role=ROLE, outcome=outcome, adapter=name, seconds=seconds, **facts)

    def _agreed(self, do: Callable[[], Any], restore: Callable[[], None] = lambda: None) -> Any:
        """Do something on all ranks and return its result; where it fails on one, ``restore`` what was before on all."""
        self.consensus.begin()
        try:
            result = do()
        except Exception as error:
            self._restore(restore)
            self.consensus.agree_on_commit(f"{type(error).__name__}: {error}")
            raise
        verdict, _ = self.consensus.agree_on_commit(None)
        if verdict is not None:
            self._restore(restore)
            raise PatchError(
                f"an adapter was not put in place, {verdict}",
                patch=ID,
                advice="The adapters from before are in place on all ranks; send it again.",
            )
        return result

    def _restore(self, restore: Callable[[], None]) -> None:
        try:
            restore()
        except Exception as error:
            self.error = (
                f"an adapter could be neither put in place nor taken back: {type(error).__name__}: {error}"
            )
