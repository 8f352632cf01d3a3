"""Check received weights before they are quantized or loaded: the rollout engine's side of the audit."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fsdp")

ID = "fsdp.verl.receive_weights"
MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
TARGET = f"{MODULE}:BucketedWeightReceiver.receive_weights"


def on_receive(original, self, on_bucket_received: Any, *args: Any, **kwargs: Any) -> Any:
    """Fingerprint each bucket before ``BucketedWeightReceiver.receive_weights`` loads it.

    The last one, and with it the update, is not loaded when something is wrong.

    Raises:
        PatchError: by option, something else arrived than the trainer's shards say. Always: the trainer's
            process has no fingerprints to offer, or sends some that this process did not ask for.
    """
    ledger.role("worker")
    with _Arrival(engine.options("fsdp")["audit"]) as arrival:

        def on_bucket(weights: Any, *rest: Any) -> Any:
            arrival.takes(weights, bool(rest and rest[0]))
            kept = [(name, tensor) for name, tensor in weights if not arrival.ours(name)]
            try:
                return on_bucket_received(kept, *rest)
            finally:
                arrival.settles()

        result = original(self, on_bucket, *args, **kwargs)
        arrival.ends()
        return result


class _History:
    """Keep what this process received before."""

    def __init__(self) -> None:
        self.source = ""
        self.sync = 0
        self.sent: dict[str, Any] = {}
        self.audited = 0
        self.failed = 0


_history = _History()


class _Arrival:
    """Audit one sync. Large tensors are read on a second thread while the engine loads the same bucket."""

    def __init__(self, mode: str) -> None:
        from flashpatch.patches._shared import fingerprint
        from flashpatch.patches.fsdp import messages
        from flashpatch.patches.fsdp.background import Background

        self._fingerprint = fingerprint.of
        self._mode = mode
        self._wire = messages
        self._open, self._close = messages.Message(), messages.Message()
        self._header: dict[str, Any] | None = None
        self._done = False
        self._seen: dict[str, Any] = {}
        self._pending: dict[str, tuple[Any, str, Future[Any]]] = {}
        self._twice: list[str] = []
        self._background = Background()

    def __enter__(self) -> _Arrival:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()
        self._pending.clear()

    def ours(self, name: str) -> bool:
        return self._wire.ours(name)

    def takes(self, weights: Any, last: bool) -> None:
        """Read a bucket of ``(name, tensor)``; ``last`` where verl says so."""
        for name, tensor in weights:
            if name.startswith(self._wire.OPEN):
                self._opens(self._read(self._open, name, tensor))
            elif name.startswith(self._wire.CLOSE):
                table = self._read(self._close, name, tensor)
                if table is not None:
                    self._compares(table)
            else:
                self._arrives(name, tensor)
        if last:
            self.ends()

    def settles(self) -> None:
        """Finish with this bucket's tensors, whose memory is reused."""
        from flashpatch.patches.fsdp.compare import Seen

        for name, (shape, dtype, future) in self._pending.items():
            self._seen[name] = Seen(shape, dtype, future.result())
        self._pending.clear()

    def ends(self) -> None:
        """Finish the audit after the last bucket.

        Raises:
            PatchError: the fingerprints did not come.
        """
        if self._mode == "off" or self._done:
            return
        if self._header is None:
            raise self._unpatched()
        self._done = True
        if self._header["audited"]:
            self._fails(["the announced fingerprints did not arrive"])

    def _arrives(self, name: str, tensor: Any) -> None:
        if self._mode == "off":
            return
        if self._header is None:
            raise self._unpatched()
        if not self._header["audited"]:
            return
        if name in self._seen or name in self._pending:
            self._twice.append(name)
        elif self._done:
            self._fails([f"{name} arrived after all announced tensors"])
        else:
            future = self._background.submit(tensor.nbytes, self._fingerprint, tensor)
            self._pending[name] = tuple(tensor.shape), str(tensor.dtype), future

    def _read(self, message: Any, name: str, tensor: Any) -> dict[str, Any] | None:
        if self._mode == "off":
            raise PatchError(
                "the trainer sends fingerprints, but here the audit is off.",
                patch=ID,
                target=TARGET,
                advice="Give all processes of a job the same option audit of fsdp.",
            )
        try:
            return message.add(name, tensor)
        except (ValueError, OverflowError) as error:
            raise self._refusal(str(error)) from error

    def _opens(self, header: dict[str, Any] | None) -> None:
        if header is None:
            return
        self._header = header
        known = _history
        if header["source"] != known.source:
            known.source, known.sync, known.sent = header["source"], 0, {}
        if header["sync"] <= known.sync:
            self._fails([f"sync {header['sync']} is a replay: sync {known.sync} was received before"])
        known.sync = header["sync"]

    def _compares(self, table: dict[str, Any]) -> None:
        from flashpatch.patches.fsdp.compare import Seen, differences

        self.settles()
        self._done = True
        header = self._header
        if header is None or table["sync"] != header["sync"]:
            self._fails(["the fingerprints are not those of this sync"])
            return
        sent = {name: Seen.of_json(value) for name, value in table["sent"].items()}
        found = differences(sent, self._seen, self._twice, table["not_audited"], _history.sent)
        if table["not_audited"]:
            logger.warning(
                "%d tensors are not audited: %s", len(table["not_audited"]), table["not_audited"][:6]
            )
        _history.sent = sent
        _history.audited += 1
        if found:
            self._fails(found)
        self._notes(tensors=len(sent), not_audited=len(table["not_audited"]))

    def _fails(self, found: list[str]) -> None:
        """Refuse the update or report it, as the option ``audit`` says."""
        from flashpatch.patches.fsdp.compare import shortened

        _history.failed += 1
        problem = f"{len(found)} of the weights differ from the trainer's shards: {shortened(found)}."
        self._notes(problem=problem)
        if self._mode == "refuse":
            raise self._refusal(problem)
        logger.error("[flashpatch: %s] %s", ID, problem)

    def _notes(self, **facts: Any) -> None:
        ledger.note(
            audit={
                "sync": _history.sync,
                "audited": _history.audited,
                "failed": _history.failed,
                "seconds": round(self._background.seconds, 4),
                **facts,
            }
        )

    def _refusal(self, problem: str) -> PatchError:
        sync = self._header["sync"] if self._header else "of unknown number"
        return PatchError(
            f"sync {sync} is refused: {problem}",
            patch=ID,
            target=TARGET,
            advice="The rollout engine keeps its weights. To load such weights anyway, set audit=report.",
        )

    def _unpatched(self) -> PatchError:
        return PatchError(
            "weights arrive without fingerprints: the process that sends them, the trainer's, does not carry "
            "the family fsdp, or has its audit off.",
            patch=ID,
            target=TARGET,
            advice="flashpatch-verify --live shows the processes of the job. Or set the option audit to off.",
        )


PATCH = Patch(
    id=ID,
    targets=(TARGET,),
    requires="verl>=0.7",
    wrapper=on_receive,
    contract=Contract(
        params=("on_bucket_received",),
        mentions=("metadata", "self.buffer", "weights"),
        exists=(f"{MODULE}:BucketedWeightReceiver", f"{MODULE}:BucketedWeightSender.async_send_weights"),
    ),
    evidence="update",
    scope=frozenset({"worker"}),
    why="A rollout engine loads whatever arrives; with wrong weights the policy trains on another's text.",
    how="Fingerprints each tensor as it arrives, whole, before it is quantized or loaded, and compares with "
    "the trainer's before the last bucket is loaded.",
    remove_when="verl checks what arrives against the trainer's shards.",
)
