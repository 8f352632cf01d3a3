"""Give the job of the probe of family fsdp further faults in transit, in a process forked from one that has imported this.

What a trainer had to send for each entry of the plan lies as ``trainer-RANK-NUMBER.pt`` beside what its worker got."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wrapt


def _further(job: Any) -> None:
    import torch

    send, stepped, old = job._send, job._Engines.stepped, dict[str, Any]()

    def sent(workdir: Path, rank: int, number: int, weights: Any, entry: dict[str, Any]) -> None:
        kept: dict[str, Any] = {}
        try:
            send(workdir, rank, number, spoilt(noted(weights, kept), entry), entry)
        finally:
            torch.save(kept, workdir / f"trainer-{rank}-{number}.pt")
            old.update(kept)

    def noted(weights: Any, kept: dict[str, Any]) -> Iterator[Any]:
        for name, tensor in weights:
            if not name.startswith("__flashpatch"):
                kept[name] = tensor.detach().clone()
            yield name, tensor

    def spoilt(weights: Any, entry: dict[str, Any]) -> Iterator[Any]:
        """Exchange two elements, leave a tensor out, send it twice or stale, an extra one, another shape or dtype."""
        what = entry.get("tamper")
        for name, tensor in weights:
            if name != entry.get("victim") or what in (None, "bit", "buffer"):
                yield name, tensor
                continue
            if what == "missing":
                continue
            if what == "stale":
                tensor = old[name]
            if what == "exchange":
                tensor = tensor.detach().clone()
                flat = tensor.view(-1)
                flat[[1, 2]] = flat[[2, 1]]
            if what == "shape":
                tensor = tensor.reshape(1, *tensor.shape)
            if what == "dtype":
                tensor = tensor.to(torch.float64)
            yield name, tensor
            if what == "extra":
                yield "model.norm.bias", tensor
            if what == "twice":
                for i in range(3):  # enough to fill a bucket: names within one are unique anyway
                    yield f"model.filler.{i}", torch.zeros(job.BUCKET << 18)
                yield name, tensor

    def apart(self: Any, entry: dict[str, Any]) -> Any:
        """Let rank 1 alone change its weights where an entry says so."""
        engine = stepped(self, entry)
        if entry.get("apart") and torch.distributed.get_rank():
            with torch.no_grad():
                next(engine.module.parameters()).add_(1.0)
        return engine

    job._send, job._Engines.stepped = sent, apart


wrapt.register_post_import_hook(_further, "flashpatch.verify.probes.fsdp.job")
