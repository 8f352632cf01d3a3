"""Run the probe's patched engine as a user's program would, with an extension that runs on the worker."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.verify.probes.fp8 import tiny

if TYPE_CHECKING:
    import torch

_BUCKETS = 5
_LAST_ROW = 1.5  # seconds until every process has written its last row


class Extension:
    """Joined to the worker's class by vLLM's own ``worker_extension_cls``, as verl does; called by name."""

    def flashpatch_probe_look(self) -> dict[str, Any]:
        """Return the ids of this process and its parent, dtype and address of every parameter and buffer, and the
        kernels."""
        model = self.get_model()
        parameters = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        tensors = {
            name: {"at": [id(tensor), tensor.data_ptr()], "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in (*parameters, *buffers)
        }
        from flashpatch.patches.fp8.precision.quantize_on_load import kernels

        return {"pid": os.getpid(), "parent": os.getppid(), "tensors": tensors, "kernels": kernels(model)}

    def flashpatch_probe_load(self, checkpoint: str, finish: bool) -> None:
        """Stream a checkpoint into ``model.load_weights`` in buckets that cut every fused layer.

        With ``finish``, post-process at the end as verl's receiver does; else the engine must do it by itself.
        """
        model = self.get_model()
        for bucket in range(_BUCKETS):
            model.load_weights(_bucket(Path(checkpoint), bucket))
        if finish:
            from vllm.model_executor.model_loader.utils import process_weights_after_loading

            process_weights_after_loading(model, self.model_config, self.device)


def _bucket(checkpoint: Path, number: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every fifth tensor by name, so that shards of a fused layer come in different buckets."""
    from safetensors import safe_open

    with safe_open(str(checkpoint / "model.safetensors"), framework="pt") as tensors:
        for name in sorted(tensors.keys())[number::_BUCKETS]:
            yield name, tensors.get_tensor(name)


def main() -> None:
    """Run the driver: ``python -c ... WORKDIR``."""
    _Job(Path(sys.argv[1])).run()


def _stock(args: Any) -> dict[str, Any]:
    """Return keywords with which stock vLLM opens a checkpoint in the precision chosen for ``args``."""
    chosen = args.create_engine_config().model_config.quantization
    overrides = {key: value for key, value in args.hf_overrides.items() if key != "quantization_config"}
    return {"quantization": chosen, "hf_overrides": overrides}


class _Job:
    """Open the engine, update it, and keep ``seen.json`` and the answers in ``workdir`` up to date."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._seen: dict[str, Any] = {"seconds": {}, "looks": [], "spans": []}
        self._began = time.monotonic()

    def run(self) -> None:
        import numpy
        from vllm import LLM, EngineArgs

        a, b = (str(self._workdir / name) for name in "ab")
        arguments = tiny.engine_arguments(a, worker_extension_cls=f"{__name__}.{Extension.__name__}")
        step = "before"
        try:
            self._write("keywords.json", _stock(EngineArgs(**arguments)))
            llm = LLM(**arguments)
            self._seen["quantization"] = llm.llm_engine.model_config.quantization
            updates: dict[str, Callable[[], Any]] = {
                "before": lambda: None,
                "identity": lambda: llm.collective_rpc("flashpatch_probe_load", args=(a, False)),
                "perturbation": lambda: llm.collective_rpc("flashpatch_probe_load", args=(b, True)),
                "return": lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": a}),
            }
            for step, update in updates.items():
                update()
                numpy.save(self._workdir / f"{step}.npy", tiny.answers(llm))
                self._seen["spans"].append(tiny.version_spans(llm))
                self._look(llm)
                self._done(step)
        except Exception as error:
            traceback.print_exc()
            self._seen["failed"] = {"step": step, "error": f"{type(error).__name__}: {error}"}
            self._write("seen.json", self._seen)
        time.sleep(_LAST_ROW)
        # vLLM's shutdown would take seconds; the probe ends what is left of this session.
        os._exit("failed" in self._seen)

    def _look(self, llm: Any) -> None:
        [worker] = llm.collective_rpc("flashpatch_probe_look")
        driver = os.getpid()
        core = worker["parent"] if worker["parent"] != driver else worker["pid"]
        self._seen["pids"] = {"driver": driver, "engine-core": core, "worker": worker["pid"]}
        self._seen["looks"].append(worker["tensors"])
        self._seen["kernels"] = worker["kernels"]

    def _done(self, step: str) -> None:
        now = time.monotonic()
        self._seen["seconds"][step] = now - self._began
        self._began = now
        self._write("seen.json", self._seen)

    def _write(self, name: str, value: Any) -> None:
        """Write a file atomically: other processes wait for it."""
        draft = self._workdir / f".{name}"
        draft.write_text(json.dumps(value))
        draft.replace(self._workdir / name)
