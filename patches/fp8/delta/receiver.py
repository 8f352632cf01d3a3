"""The receiving end: keep the weights as they came, bring them up to date, and hand all of them on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.delta import wire

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]


class Damaged(Exception):
    """What arrived is not what was sent."""


class Receiver:
    """Hold a copy of all weights in host memory.

    An update is: `take`, then whoever loads what it returns, then `commit`; anything that fails in between leaves the copy
    without a version, so that the next sync must bring everything.

    Attributes:
        version: of the copy; None if it is of none.
        refused: why the last sync was not taken; empty if it was.
        facts: plain numbers of the last sync, for the ledger."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._next: str | None = None
        self.version: str | None = None
        self.refused = ""
        self.facts: dict[str, Any] = {}

    def forget(self) -> None:
        """Give the copy and its version up."""
        self._copies, self._next, self.version = {}, None, None

    def commit(self) -> None:
        """Give the copy the version that was taken, since it has been loaded."""
        self.version, self._next = self._next, None

    async def take(self, weights: AsyncIterator[Named]) -> AsyncIterator[Named] | None:
        """Receive one sync.

        Args:
            weights: what the transfer yields; a tensor's memory may be used again after the next one.

        Returns:
            All weights, each whole, on the device on which they arrived, while they arrive if everything comes; or None if
            the sync was refused: then it was taken to its end, and ``refused`` says why."""
        from flashpatch.patches._shared.tensor_message import Message

        self.refused, self.facts, self._next = "", {}, None
        items = aiter(weights)
        first = await anext(items, None)
        held, self.version = self.version, None
        if first is None or not first[0].startswith(wire.OPEN):
            self.forget()
            return _chained(first, items)
        opening = Message().add(*first)
        base, version = opening["base"], opening["version"]
        self.facts = {"base": base, "version": version, "bytes": first[1].nbytes}
        if base is None:
            return self._everything(version, items)
        if base != held:
            self.refused = (
                f"a patch leads from version {base} to {version}, and this copy is of {held or 'none'}"
            )
        device = first[1].device
        try:
            order = await self._patched(items, apply=not self.refused)
        except Damaged as damage:
            self.refused = f"version {version} is not what was sent: {damage}"
        if self.refused:
            self.forget()
            return None
        self._next = version
        return self._all(order, device)

    async def _everything(self, version: str, items: AsyncIterator[Named]) -> AsyncIterator[Named]:
        """Yield weights as they come, and keep them; raise `Damaged` after the last if they are not those that were sent."""
        self._copies = {}
        closing = _Closing()
        async for name, tensor in items:
            self.facts["bytes"] += tensor.nbytes
            if closing.takes(name, tensor):
                continue
            if not wire.is_message(name):
                self._copies[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor
        self._check(closing)
        self._next = version

    async def _patched(self, items: AsyncIterator[Named], apply: bool) -> list[Named]:
        """Write a stream of patches into the copy; return all messages and weights in order, if they are those that were sent."""
        closing, messages = _Closing(), {}
        problem = ""
        async for name, tensor in items:
            self.facts["bytes"] += tensor.nbytes
            if not apply or problem or closing.takes(name, tensor):
                continue
            if wire.is_message(name) and not wire.of_patch(name):
                messages[name] = tensor.detach().clone()
                continue
            problem = self._write(name, tensor)
        if not apply:
            return []
        if problem:
            raise Damaged(problem)
        order = self._check(closing)
        self._copies = {name: self._copies[name] for name in order if name in self._copies}
        return [(name, messages[name] if name in messages else self._copies[name]) for name in order]

    def _write(self, name: str, tensor: torch.Tensor) -> str:
        """Bring one weight of the copy up to date; return what is wrong, empty if nothing is."""
        import torch

        from flashpatch.patches.fp8.delta import changes

        patch = wire.of_patch(name)
        if patch is None:
            self._copies[name] = tensor.detach().to("cpu", copy=True)
            return ""
        copy = self._copies.get(patch.weight)
        if copy is None:
            return f"a patch came of {patch.weight}, which never came whole"
        copy = self._copies[patch.weight] = copy.to(getattr(torch, patch.dtype))
        try:
            changes.apply(changes.bits(copy), patch.width, patch.count, tensor.detach().view(-1))
        except ValueError as error:
            return f"{patch.weight}: {error}"
        return ""

    def _check(self, closing: _Closing) -> list[str]:
        """Return the names of messages and weights in order; raise `Damaged` if the copy differs from the sender's fingerprints."""
        from flashpatch.patches._shared import fingerprint

        if closing.content is None:
            raise Damaged(closing.problem)
        began = time.perf_counter()
        wrong = []
        for name, digest in closing.content["weights"]:
            if digest is None:
                continue
            if name not in self._copies or list(fingerprint.of(self._copies[name])) != digest:
                wrong.append(name)
        self.facts["seconds"] = round(time.perf_counter() - began, 6)
        if wrong:
            raise Damaged(f"{len(wrong)} weights differ from the sender's, such as {wrong[0]}")
        return [name for name, _ in closing.content["weights"]]

    @staticmethod
    async def _all(order: list[Named], device: torch.device) -> AsyncIterator[Named]:
        for name, tensor in order:
            yield name, tensor.to(device)


class _Closing:
    """Collect the closing message; ``content`` is None until it has come."""

    def __init__(self) -> None:
        from flashpatch.patches._shared.tensor_message import Message

        self._message = Message()
        self.content: Any = None
        self.problem = "its end did not arrive"

    def takes(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a piece of it, which is then added."""
        if not name.startswith(wire.CLOSE):
            return False
        try:
            self.content = self._message.add(name, tensor)
        except ValueError as error:
            self.problem = str(error)
        return True


async def _chained(first: Named | None, rest: AsyncIterator[Named]) -> AsyncIterator[Named]:
    if first is not None:
        yield first
    async for item in rest:
        yield item
