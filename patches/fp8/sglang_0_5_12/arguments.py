"""Set the family's precision on engines of SGLang 0.5.12 opened without an explicit quantization."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.fp8.sglang import engine_args
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang

OF_ANOTHER_SERVER: ContextVar[bool] = ContextVar("flashpatch_of_another_server", default=False)
"""Whether arguments describe a server that another process has opened, and stay as they are."""


@for_old_sglang(
    scope="driver",
    evidence="optional",  # imported where an engine starts; verl's driver has others start it
    when=f"called={FRAMEWORK}.launch_scheduler_processes",
    why=Patches.of(engine_args.run_resolution_pipeline).why,
).wrap(
    "sglang.srt.server_args:ServerArgs.__post_init__",
    relies_on=("self.quantization", "self._handle_missing_default_values", engine_args.GET_CONFIG),
)
def server_args_post_init(original, self, *args: Any, **kwargs: Any) -> None:
    """Set quantization if it is unset, the checkpoint is not quantized and the model is not excluded."""
    fields = {} if OF_ANOTHER_SERVER.get() else engine_args.fields_for(self, server_args_post_init)
    for name, value in fields.items():  # SGLang derives everything else from them
        setattr(self, name, value)
    original(self, *args, **kwargs)
