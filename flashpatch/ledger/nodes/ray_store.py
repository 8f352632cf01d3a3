"""Read and write Ray's key-value store, which lies on the head node, and list the nodes of the cluster.

The only module of `flashpatch` that imports Ray: in a process that is connected to it, or that was asked to read from
it. Ray is no dependency."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from flashpatch.ledger.nodes.keys import NAMESPACE

TIMEOUT = 5.0
"""Seconds that a call may take."""


class StoreError(Exception):
    """Say why Ray's store cannot be used."""


class Connection(NamedTuple):
    """What a process that is connected to Ray knows of it."""

    address: str  # ``host:port`` of Ray's head
    node: str  # id of this process's node, hexadecimal
    is_driver: bool  # whether this process started the job


def connection() -> Connection | None:
    """Return this process's connection to Ray, or None; Ray is not imported for it.

    It reads attributes alone: a call into Ray's core from this thread could meet a ``ray.shutdown()`` in another. A
    process of Ray Client (``ray://``) is on no node, and has none.

    Raises:
        StoreError: this version of Ray has no such attributes."""
    worker = getattr(sys.modules.get("ray._private.worker"), "global_worker", None)
    node = getattr(worker, "node", None)
    if node is None or not getattr(worker, "connected", False):
        return None
    try:
        is_driver = getattr(worker, "mode", None) == sys.modules["ray"].SCRIPT_MODE
        return Connection(str(node.gcs_address), str(node.node_id), is_driver)
    except AttributeError as error:
        raise _explained(error) from error


def address(wanted: str) -> str:
    """Return ``host:port`` of a cluster's head; for an empty text that of ``RAY_ADDRESS``, or of the one running here.

    Raises:
        StoreError: there is none, or Ray is not installed."""
    try:
        from ray._private import services

        return str(services.canonicalize_bootstrap_address_or_die(wanted or "auto"))
    except Exception as error:  # whatever Ray raises means the same to the caller
        raise _explained(error) from error


class Store:
    """Keys and values of FlashPatch's namespace, on Ray's head at ``host:port``. A call may take ``timeout`` seconds.

    Every method raises `StoreError`, and may be called from any thread."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.timeout = TIMEOUT
        host, _, port = address.rpartition(":")
        try:
            from ray._raylet import GcsClient

            # Ray itself tries for half a minute if no server listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT).close()
            self._client = GcsClient(address=address)
        except OSError as error:
            raise StoreError(f"no cluster answers at {address}: {error}") from error
        except Exception as error:  # RpcError is no subclass of anything narrower
            raise _explained(error) from error

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        self._call("internal_kv_put", key.encode(), value, True, NAMESPACE, self.timeout)

    def get(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the values of those keys that are there."""
        wanted = [key.encode() for key in keys]
        if not wanted:
            return {}
        found = self._call("internal_kv_multi_get", wanted, NAMESPACE, self.timeout)
        return {key.decode(): value for key, value in found.items()}

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a text, sorted."""
        found = self._call("internal_kv_keys", prefix.encode(), NAMESPACE, self.timeout)
        return sorted(key.decode() for key in found)

    def delete(self, key: str, prefix: bool = False) -> None:
        """Remove a key, or all keys that begin with it."""
        self._call("internal_kv_del", key.encode(), prefix, NAMESPACE, self.timeout)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return node ids to ``name``, ``address`` and ``alive``, dead ones included."""
        found = self._call("get_all_node_info", timeout=self.timeout)
        return {
            id.hex(): {"name": info.node_name, "address": info.node_manager_address, "alive": info.state == 0}
            for id, info in found.items()
        }

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._client, method)(*args, **kwargs)
        except Exception as error:  # RpcError is no subclass of anything narrower
            raise _explained(error) from error


def _explained(error: Exception) -> StoreError:
    if isinstance(error, ModuleNotFoundError) and error.name == "ray":
        return StoreError("Ray is not installed here")
    version = getattr(sys.modules.get("ray"), "__version__", "of an unknown version")
    text = str(error).strip().splitlines()
    return StoreError(f"Ray {version}: {text[0] if text else type(error).__name__}")
