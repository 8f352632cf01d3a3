"""KV connectors that keep the KV of prompts on disk, for engines on a CPU: vLLM's own example, and variants of its reset.

``open_llm(model, kv_transfer_config=config("Forgetting", folder))``"""

import shutil
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


def config(connector: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the engine's ``kv_transfer_config`` for a class of this module."""
    return dict(
        kv_connector=connector,
        kv_connector_module_path="kv_connectors",
        kv_role="kv_both",
        kv_connector_extra_config=dict(shared_storage_path=str(folder), **more),
    )


class Silent(ExampleConnector):
    """Keep KV, and do not implement ``reset_cache``. Counts what it brings back."""

    loads = 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        Silent.loads += num_external_tokens > 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class Forgetting(Silent):
    """Delete what is kept when it is reset. Counts resets; returns what its configuration says under ``answer``."""

    resets = 0

    def reset_cache(self) -> bool | None:
        Forgetting.resets += 1
        answer = self._kv_transfer_config.get_from_extra_config("answer", True)
        assert answer != "error"
        if answer is not False:
            for kept in Path(self._storage_path).iterdir():
                shutil.rmtree(kept)
        return answer


class Late(Forgetting):
    """Keep a prompt's KV some steps after it was computed, as asynchronous offloading does."""

    DELAY = 6

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._step, self._due = 0, []

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self._step += 1
        self._due += [(self._step + self.DELAY, request) for request in meta.requests if request.is_store]
        meta.requests = [request for request in meta.requests if not request.is_store]
        meta.requests += [request for step, request in self._due if step <= self._step]
        self._due = [(step, request) for step, request in self._due if step > self._step]
        return meta
