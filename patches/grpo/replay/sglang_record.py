"""Let verl read the experts that SGLang recorded."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

from flashpatch.record import Contract, Patch

KEY = "routed_experts"


class Record(str):
    """Hold SGLang's text of recorded experts, which it is for everybody else too."""

    __slots__ = ("shape",)
    shape: tuple[int, int, int]

    def numpy(self) -> Any:
        """Return the experts, ``(tokens, layers, experts per token)``, int32."""
        import numpy

        return numpy.frombuffer(base64.b64decode(self), dtype=numpy.int32).reshape(self.shape)


def on_request(original, self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Around ``TokenizerManager.generate_request``: of a request that asks for experts, make them readable as verl reads them."""
    outputs = original(self, obj, *args, **kwargs)
    if not getattr(obj, f"return_{KEY}", False):
        return outputs
    config = self.model_config.hf_text_config
    return readable(outputs, (-1, config.num_hidden_layers, config.num_experts_per_tok))


async def readable(outputs: AsyncIterator[Any], shape: tuple[int, int, int]) -> AsyncIterator[Any]:
    """Yield the outputs, their experts as a `Record`."""
    async for output in outputs:
        found = output["meta_info"].get(KEY) if isinstance(output, dict) else None
        if isinstance(found, str):
            output["meta_info"][KEY] = record = Record(found)
            record.shape = shape
        yield output


PATCH = Patch(
    id="grpo.sglang.generate_request",
    targets=("sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",),
    requires="sglang>=0.5.12",
    wrapper=on_request,
    contract=Contract(
        params=("obj", "request"),
        exists=("sglang.srt.managers.io_struct:GenerateReqInput.return_routed_experts",),
    ),
    evidence="optional",
    scope=frozenset({"driver"}),
    why="SGLang returns recorded experts as text; verl takes them for a tensor, and every request of a job with "
    "rollout.enable_rollout_routing_replay ends with an AttributeError.",
    how="Gives that text the method that verl calls; for all others it is the text that it was.",
    remove_when="verl decodes SGLang's record of experts.",
)
