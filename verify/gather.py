"""Bring a run that is published in Ray's key-value store into a ledger here, for the commands that read ledgers."""

from __future__ import annotations

from pathlib import Path

from flashpatch.errors import PatchError
from flashpatch.ledger.nodes import node, published, ray_store

HELP = (
    "first copy the run from the Ray cluster at this address (default: RAY_ADDRESS, or the cluster running here) into "
    "the ledger, with the rows of all its nodes"
)


class Gathered:
    """A run of a cluster and its copy here.

    Attributes:
        folder: the run's directory in the ledger.
    """

    def __init__(self, ledger: Path, address: str, run: str | None = None) -> None:
        """Copy the run ``run``, or the one that was published to last.

        Raises:
            LookupError: the cluster has no such run; the message lists the newest ones.
            PatchError: the cluster cannot be reached, or the ledger not be written.
        """
        try:
            self._store = ray_store.Store(ray_store.address(address))
            found = published.run_ids(self._store)
        except ray_store.StoreError as error:
            raise _unreachable(error) from error
        if not found or (run is not None and run not in found):
            wanted = f"run {run!r}" if run is not None else "run"
            raise LookupError(
                f"no {wanted} is published on the Ray cluster at {self._store.address}; the newest are: "
                f"{', '.join(found[-5:]) or 'none'}"
            )
        self.folder = ledger / (run or found[-1])
        self.renew()

    def renew(self) -> None:
        """Copy what changed since. Raises PatchError as at first."""
        try:
            node.fetch(self._store, self.folder.name, self.folder)
        except ray_store.StoreError as error:
            raise _unreachable(error) from error
        except OSError as error:
            raise PatchError(
                f"{self.folder} cannot be written: {error}", advice="Name another ledger."
            ) from None


def _unreachable(error: Exception) -> PatchError:
    return PatchError(
        f"the ledger cannot be read from Ray: {error}.",
        advice="Name the cluster's address, HOST:PORT, after --ray, or leave --ray out to read the ledger here.",
    )
