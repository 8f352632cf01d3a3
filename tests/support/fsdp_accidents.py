"""Give the job of the probe of family fsdp further faults in transit, in a process forked from one that has imported this."""

from collections.abc import Iterator
from typing import Any

import wrapt


def _further(job: Any) -> None:
    import torch

    flipped = job.tampered

    def tampered(weights: Any, entry: dict[str, Any], old: dict[str, Any]) -> Iterator[Any]:
        """Exchange two elements, leave a tensor out, send it twice or stale, an extra one, another shape or dtype."""
        what = entry.get("tamper")
        for name, tensor in flipped(weights, entry, old):
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

    job.tampered = tampered


wrapt.register_post_import_hook(_further, "flashpatch.verify.probes.fsdp.job")
