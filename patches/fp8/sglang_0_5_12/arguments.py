"""Set the family's precision on engines of SGLang 0.5.12 to 0.5.20 opened without an explicit quantization."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.fp8.sglang import engine_args
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang

OF_ANOTHER_SERVER: ContextVar[bool] = ContextVar("flashpatch_of_another_server", default=False)
"""Whether arguments describe a server that another process has opened, and stay as they are."""

_newer = Patches.of(engine_args.run_resolution_pipeline)


@for_old_sglang(
    scope="driver",
    evidence="optional",  # imported where an engine starts; verl's driver has others start it
    when=f"called={FRAMEWORK}.launch_scheduler_processes",
    why=_newer.why,
).wrap(
    *_newer.targets,  # from 0.5.19 on
    "sglang.srt.server_args:ServerArgs.__post_init__",
    relies_on=engine_args.GET_CONFIG,
    since={"0.5.19": (engine_args.DECLARE,)},
    params=(),
)
def server_args_post_init(original, arguments: Any, *args: Any, **kwargs: Any) -> None:
    """Set quantization if it is unset, the checkpoint is not quantized and the model is not excluded."""
    fields = {} if OF_ANOTHER_SERVER.get() else engine_args.fields_for(arguments, server_args_post_init)
    if hasattr(arguments, "resolve_once"):  # they keep what the user gave
        engine_args.declare(arguments, server_args_post_init, fields)
    else:
        for name, value in fields.items():  # SGLang derives everything else from them
            setattr(arguments, name, value)
    original(arguments, *args, **kwargs)
