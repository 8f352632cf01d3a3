"""An update session with an audit's messages, as verl's trainer would send it, whole or with one fault."""

from collections.abc import Iterator
from typing import Any

import sglang_session
import torch

SOURCE = "trainer of a test"


def session(engine: Any, buckets: list[list[Any]], number: int, fault: str, victim: str) -> list[Any]:
    """Send one session in buckets of ``(name, tensor)``; every answer, of the beginning and the end too.

    ``fault``: bit, missing, unclosed (no closing message), unpatched (no message), rank1 (a bit flipped in
    what the second rank gets), or empty."""
    answers = [sglang_session.begin(engine, "target", f"sync-{number}")]
    for bucket in with_messages(buckets, number, fault):
        answers.append(send(engine, bucket, fault, victim))
    return [*answers, sglang_session.end(engine)]


def with_messages(buckets: list[list[Any]], number: int, fault: str) -> Iterator[list[Any]]:
    """The same buckets, a message before the first tensor and one behind the last."""
    from flashpatch.patches._shared import fingerprint
    from flashpatch.patches.fsdp.fingerprints import Seen, closing, opening

    cpu = torch.device("cpu")
    sent = {
        name: Seen(tuple(t.shape), str(t.dtype), fingerprint.of(t)).as_json()
        for b in buckets
        for name, t in b
    }
    first = list(opening({"source": SOURCE, "sync": number, "audited": True}, cpu))
    last = list(closing({"sync": number, "sent": sent, "not_audited": []}, cpu))
    for at, bucket in enumerate(buckets):
        before = first if at == 0 and fault != "unpatched" else []
        behind = last if at == len(buckets) - 1 and fault not in ("unpatched", "unclosed") else []
        yield [*before, *bucket, *behind]


def send(engine: Any, bucket: list[Any], fault: str, victim: str) -> Any:
    """Send one bucket; a bit flips behind the trainer's fingerprints."""
    altered = []
    for name, tensor in bucket:
        if name != victim or fault not in ("bit", "missing", "rank1"):
            altered.append((name, tensor))
        elif fault != "missing":
            flipped = tensor.clone()
            flipped.view(torch.uint8).view(-1)[5] ^= 4
            altered.append((name, flipped))
    payload = sglang_session.serialized(engine, altered)
    if fault == "rank1":
        payload[0] = sglang_session.serialized(engine, bucket)[0]
    return sglang_session.send(engine, payload, "target")
