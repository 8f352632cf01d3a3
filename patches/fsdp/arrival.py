"""Audit the weights of one sync as they arrive in a rollout engine, before they are quantized or loaded: those of verl's
worker of vLLM here, those of SGLang's schedulers in `sglang`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.tensor_message import Message
from flashpatch.patches.fsdp.fingerprints import CLOSE, OPEN, Background, Seen, differences, shortened

logger = logging.getLogger("flashpatch.fsdp")


@dataclass
class _History:
    source: str = ""
    sync: int = 0
    sent: dict[str, Seen] = field(default_factory=dict)
    audited: int = 0
    failed: int = 0


_history = _History()


class Arrival:
    """Audit one sync. Large tensors are read on a second thread while the engine loads the same bucket.

    Attributes:
        at, expected: see the arguments; nothing is expected if the audit is off.

    Args:
        at: of the patch that receives, see `Patches.at`; errors name it.
        expected: whether the weights come from verl's trainer and must bring fingerprints; others are audited
            if they do."""

    def __init__(self, at: dict[str, str], expected: bool = True) -> None:
        from flashpatch.patches._shared import fingerprint

        self._mode = engine.options("fsdp")["audit"]
        self.at, self.expected = at, expected and self._mode != "off"
        self._fingerprint = fingerprint.of
        self._open, self._close = Message(), Message()
        self._header: dict[str, Any] | None = None
        self._done = False
        self._failure: PatchError | None = None
        self._seen: dict[str, Any] = {}
        self._pending: dict[str, tuple[Any, str, Future[Any]]] = {}
        self._twice: list[str] = []
        self._background = Background()

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading, and let go of the tensors."""
        self._background.close()
        self._pending.clear()

    def receive(self, weights: Iterable[tuple[str, Any]], last: bool = False) -> list[tuple[str, Any]]:
        """Read a bucket; ``last`` if verl says so.

        Args:
            weights: names and tensors of any shape and dtype, messages among them.

        Returns:
            The weights without the messages, to be loaded.

        Raises:
            PatchError: by option, something else arrived than the trainer's shards say, in this bucket or
                before. Always: no fingerprints come with the weights, or some that this side did not ask for."""
        kept = []
        with self._failing():
            for name, tensor in weights:
                if name.startswith(OPEN):
                    self._begin(self._read(self._open, name, tensor))
                elif name.startswith(CLOSE):
                    table = self._read(self._close, name, tensor)
                    if table is not None:
                        self._compare(table)
                else:
                    self._add(name, tensor)
                    kept.append((name, tensor))
        if last:
            self.finish()
        return kept

    def finish_bucket(self) -> None:
        """Finish with this bucket's tensors, whose memory is reused; an unreadable one fails the audit."""
        for name, (shape, dtype, future) in self._pending.items():
            try:
                self._seen[name] = Seen(shape, dtype, future.result())
            except Exception as error:
                self._failure = self._failure or self._refusal(f"{name} cannot be read: {error!r}")
        self._pending.clear()

    def finish(self) -> None:
        """Finish the audit after the last bucket. Raises PatchError if the fingerprints did not come, or the audit
        failed before."""
        with self._failing():
            if self._mode == "off" or self._done or (self._header is None and not self.expected):
                return
            if self._header is None:
                raise self._unpatched()
            self._done = True
            if self._header["audited"]:
                self._refuse_or_report(["the announced fingerprints did not arrive"])

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise the failure of a bucket before; remember one that happens within."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except PatchError as error:
            self._failure = error
            raise
        if self._failure is not None:
            raise self._failure

    def _add(self, name: str, tensor: Any) -> None:
        if self._mode == "off":
            return
        if self._header is None:
            if self.expected:
                raise self._unpatched()
            return
        if not self._header["audited"]:
            return
        if name in self._seen or name in self._pending:
            self._twice.append(name)
        elif self._done:
            self._refuse_or_report([f"{name} arrived after all announced tensors"])
        else:
            future = self._background.submit(tensor, self._fingerprint, tensor)
            self._pending[name] = tuple(tensor.shape), str(tensor.dtype), future

    def _read(self, message: Any, name: str, tensor: Any) -> dict[str, Any] | None:
        if self._mode == "off":
            raise PatchError(
                "the trainer sends fingerprints, but here the audit is off.",
                **self.at,
                advice="Give all processes of a job the same option audit of fsdp.",
            )
        try:
            return message.add(name, tensor)
        except (ValueError, OverflowError) as error:
            raise self._refusal(str(error)) from error

    def _begin(self, header: dict[str, Any] | None) -> None:
        if header is None:
            return
        self._header = header
        known = _history
        if header["source"] != known.source:
            known.source, known.sync, known.sent = header["source"], 0, {}
        if header["sync"] <= known.sync:
            self._refuse_or_report(
                [f"sync {header['sync']} is a replay: sync {known.sync} was received before"]
            )
        known.sync = header["sync"]

    def _compare(self, table: dict[str, Any]) -> None:
        self.finish_bucket()
        self._done = True
        header = self._header
        if header is None or table["sync"] != header["sync"]:
            self._refuse_or_report(["the fingerprints are not those of this sync"])
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
            self._refuse_or_report(found)
        self._note(tensors=len(sent), not_audited=len(table["not_audited"]))

    def _refuse_or_report(self, found: list[str]) -> None:
        """Refuse the update or report it, as the option ``audit`` says."""
        _history.failed += 1
        problem = f"{len(found)} of the weights differ from the trainer's shards: {shortened(found)}."
        self._note(problem=problem)
        if self._mode == "refuse":
            raise self._refusal(problem)
        logger.error("[flashpatch: %s] %s", self.at["patch"], problem)

    def _note(self, **facts: Any) -> None:
        audit = {
            "sync": _history.sync,
            "audited": _history.audited,
            "failed": _history.failed,
            "seconds": round(self._background.seconds, 4),
            **facts,
        }
        ledger.note(audit=audit)
        ledger.event("audit", **audit)

    def _refusal(self, problem: str) -> PatchError:
        sync = self._header["sync"] if self._header else "of unknown number"
        return PatchError(
            f"sync {sync} is refused: {problem}",
            **self.at,
            advice="The update is not committed. To load such weights anyway, set audit=report.",
        )

    def _unpatched(self) -> PatchError:
        return PatchError(
            "weights arrive without fingerprints: the process that sends them, the trainer's, does not carry "
            "the family fsdp, or has its audit off.",
            **self.at,
            advice="flashpatch-verify --live shows the processes of the job. Or set the option audit to off.",
        )


BUCKETS = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
TARGET = f"{BUCKETS}:BucketedWeightReceiver.receive_weights"

patches = Patches("fsdp", "verl>=0.7", framework="verl_vllm", scope="worker", evidence="update")


@patches.wrap(
    TARGET,
    relies_on=(
        "metadata",
        "self.buffer",
        "weights",
        f"{BUCKETS}:BucketedWeightReceiver",
        f"{BUCKETS}:BucketedWeightSender.async_send_weights",
    ),
    why="A rollout engine loads whatever arrives; with wrong weights the policy trains on another's text.",
    remove_when="verl checks what arrives against the trainer's shards.",
)
def receive_weights(original, self, on_bucket_received: Any, *args: Any, **kwargs: Any) -> Any:
    """Fingerprint each tensor as it arrives, whole, before it is quantized or loaded, and compare with the trainer's before
    the last bucket is loaded.

    Raises PatchError if, by option, something else arrived than the trainer's shards say. Always if the trainer's
    process has no fingerprints to offer, or sends some that this process did not ask for."""
    ledger.role("worker")
    with Arrival(patches.at(receive_weights)) as arrival:

        def on_bucket(weights: Any, *rest: Any) -> Any:
            kept = arrival.receive(weights, bool(rest and rest[0]))
            try:
                return on_bucket_received(kept, *rest)
            finally:
                arrival.finish_bucket()

        result = original(self, on_bucket, *args, **kwargs)
        arrival.finish()
        return result
