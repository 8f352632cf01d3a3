"""Pass references to buckets from a trainer to rollouts, and tell everybody why a transfer ends.

Ray carries the bytes, keeps them until nobody refers to them, and notices that a process ended: an actor ends with the
process that made it, and awaiting a reference raises once its owner has ended. `Exchange` keeps what is left: how far
each rollout is, who is waited for, and the first error."""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from flashpatch.errors import PatchError

ADVICE = "No rollout takes a part of this version for a policy; send the whole version again, or end the job."
_TIMEOUT = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.timeout_seconds"
_LONGEST = 20_000  # characters of a peer's traceback that are passed on
_SELF = "the actor through which weights are sent"


def transfer_error(problem: str, advice: str = ADVICE) -> PatchError:
    """Return an error of the checkpoint engine."""
    return PatchError(problem, patch="checkpoint engine gloo", advice=advice)


def silence(what: str, version: str, seconds: float) -> PatchError:
    """Return the error for a process that is alive and did not do something in time."""
    return transfer_error(
        f"{what} in {seconds:g} s ({version}).", f"If it is slow and not stuck, raise {_TIMEOUT}."
    )


def myself() -> str:
    """Name this process for errors at other places."""
    return f"process {os.getpid()} on {socket.gethostname()}"


class Exchange:
    """An actor of the trainer's rank 0, used by all of its transfers, one at a time.

    Each method returns an error as a value: raised, Ray would wrap it.

    Args:
        timeout: seconds of silence after which a process counts as stuck."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._changed = timeout, asyncio.Condition()
        self._transfer = 0
        self._begin({})

    def _begin(self, peers: dict[int, str]) -> None:
        self._peers, self._asked = peers, dict.fromkeys(peers, -1)
        self._items: dict[int, Any] = {}
        self._error: PatchError | None = None
        self._version = "the next version"

    async def join(self, transfer: int, peers: dict[int, str], rank: int, presence: list[Any]) -> None:
        """Note that a process takes part, and follow its life until the transfer ends.

        Args:
            transfer: number of the transfer, the same in all methods; a higher one ends those before.
            peers: what each rollout's process is, for errors.
            rank: of the process, 0 for the sender.
            presence: a reference that the process owns and that `ended` fulfils; empty for the sender, with whom this
                actor ends."""
        from ray.exceptions import RayActorError, RayError

        async with self._changed:
            if transfer > self._transfer:
                self._transfer = transfer
                self._begin(peers)
                self._changed.notify_all()
        try:
            for reference in presence:
                await reference
        except RayActorError:
            pass  # this actor ends
        except RayError:
            advice = "Its log says why; it may have been killed. Leave its replica out, or end the job."
            problem = f"{_name(rank, peers)} ended during the transfer of {self._version}."
            await self.fail(transfer, transfer_error(problem, advice))

    async def ended(self, transfer: int) -> None:
        """Return when the next transfer begins."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._transfer > transfer)

    async def offer(self, transfer: int, number: int, step: int | None, item: Any) -> PatchError | None:
        """Hold out the sender's next item until every rollout has asked for it.

        Args:
            number: of the item, from 0. step: version of the weights.
            item: a list with a reference to a bucket; then what was counted; then None."""
        async with self._changed:
            await self._begun(transfer)
            if transfer == self._transfer and self._error is None:
                self._version, self._items[number] = f"version {step}", (step, item)
                self._changed.notify_all()
            error = await self._until(transfer, lambda: not self._lacking(number))
            self._items.pop(number - 1, None)
            return error

    async def take(self, transfer: int, rank: int, number: int) -> Any:
        """Return the version and the item, once it is there.

        A rollout asks when it has the item before, and has loaded the one before that."""
        async with self._changed:
            await self._begun(transfer)
            if transfer == self._transfer:
                self._asked[rank] = number
                self._changed.notify_all()
            error = await self._until(transfer, lambda: number in self._items)
            return error or self._items[number]

    async def fail(self, transfer: int, error: PatchError) -> None:
        """End the transfer for everybody; only the first error counts."""
        async with self._changed:
            await self._begun(transfer)
            if transfer == self._transfer and self._error is None:
                self._error = error
                self._items.clear()
                self._changed.notify_all()

    async def _begun(self, transfer: int) -> None:
        """Wait for the first `join`: calls of one process may arrive in another order."""
        await self._changed.wait_for(lambda: self._transfer >= transfer)

    async def _until(self, transfer: int, ready: Callable[[], bool]) -> PatchError | None:
        """Wait for something; return why the transfer has ended."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._changed.wait_for(
                    lambda: self._transfer != transfer or self._error is not None or ready()
                )
        except TimeoutError:
            if transfer == self._transfer and self._error is None:
                self._error = self._late()
                self._items.clear()
                self._changed.notify_all()
        if self._transfer != transfer:
            return transfer_error("this process belongs to an earlier transfer, which has ended.")
        return self._error

    def _late(self) -> PatchError:
        """Return the error for those who are waited for: rollouts that have not asked for the last item, else the sender."""
        last = max(self._items, default=-1)
        who, what = ", ".join(self._lacking(last)), f"ask for bucket {last}"
        if not who:
            who, what = "the trainer's rank 0", f"send bucket {last + 1}"
        elif self._items[last][1] is None:
            what = "confirm what it received"
        return silence(f"{who} did not {what}", self._version, self._timeout)

    def _lacking(self, number: int) -> list[str]:
        """Name the rollouts that have not asked for this item yet."""
        return [_name(rank, self._peers) for rank, asked in self._asked.items() if asked < number]


class Line:
    """A process's way to the `Exchange`, for one transfer.

    Args:
        exchange: handle of the actor.
        transfer, peers, rank: see `Exchange.join`.
        timeout: the exchange's; this side waits twice as long for its answers.

    Attributes:
        version: of the weights, for errors."""

    def __init__(
        self, exchange: Any, transfer: int, peers: dict[int, str], rank: int, timeout: float
    ) -> None:
        self._exchange, self._transfer, self._peers, self._timeout = exchange, transfer, peers, 2 * timeout
        self.rank, self._failed = rank, False
        self._presence = [exchange.ended.remote(transfer)] if rank else []
        self._exchange.join.remote(transfer, peers, rank, self._presence)
        self._offered: Any = None
        self.version = "the next version"

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the exchange for this transfer and return the reference to its answer."""
        return getattr(self._exchange, method).remote(self._transfer, *arguments)

    async def offer(self, number: int, step: int | None, item: Any) -> None:
        """Offer the sender's next item, see `Exchange.offer`, after every rollout has asked for the one before. Raises
        PatchError, see `answer`."""
        await self.settle()
        self._offered = self.ask("offer", number, step, item)

    async def settle(self) -> None:
        """Wait until every rollout has asked for the item that was offered last."""
        if self._offered is not None:
            await self.answer(self._offered)

    async def answer(self, reference: Any) -> Any:
        """Await an answer, or the bucket behind a reference. Raises PatchError if the transfer has ended, or a process
        that this one needs."""
        from ray.exceptions import ObjectLostError, RayActorError

        try:
            found = await asyncio.wait_for(reference, self._timeout)
        except (RayActorError, ObjectLostError) as error:
            who = "the trainer's rank 0, or the actor through which it sends," if self.rank else _SELF
            problem = f"{who} ended during the transfer of {self.version}{self._to()}: {error}."
            raise transfer_error(problem, "Its log says why.") from error
        except TimeoutError:
            raise silence(f"{_SELF} did not answer{self._to()}", self.version, self._timeout) from None
        if isinstance(found, PatchError):
            raise found
        return found

    def fail(self, why: BaseException | str) -> None:
        """Tell the exchange why this process does not go on, once; of an exception its traceback."""
        if not self._failed:
            self._failed = True
            text = why if isinstance(why, str) else "".join(traceback.format_exception(why))
            name = _name(self.rank, self._peers)
            self.ask(
                "fail", transfer_error(f"{name} failed at {self.version}:\n{text.rstrip()[-_LONGEST:]}\n")
            )

    def _to(self) -> str:
        return f" to rollout rank {self.rank}" if self.rank else ""


def _name(rank: int, peers: dict[int, str]) -> str:
    return f"rollout rank {rank} ({peers[rank]})" if rank else "the trainer's rank 0"


def opened(name: str, timeout: float) -> Any:
    """Start an `Exchange` that ends with this process."""
    import ray

    most = 10_000  # calls at a time: three per rollout
    return ray.remote(Exchange).options(name=name, num_cpus=0, max_concurrency=most).remote(timeout)


def found(name: str, rank: int) -> Any:
    """Return the trainer's `Exchange`. Raises PatchError if there is none."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise transfer_error(
            f"rollout rank {rank} ({myself()}) cannot reach the trainer: {error}.",
            "The trainer may have ended; its log says so.",
        ) from error
