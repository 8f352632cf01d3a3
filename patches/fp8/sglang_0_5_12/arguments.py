"""Set the family's precision on engines of SGLang 0.5.12 opened without an explicit quantization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashpatch.patches.fp8.sglang import engine_args
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang
from flashpatch.record import Contract

_elsewhere = False


@contextmanager
def of_another_server() -> Iterator[None]:
    """Within, arguments describe a server that another process has opened, and stay as they are."""
    global _elsewhere
    before, _elsewhere = _elsewhere, True
    try:
        yield
    finally:
        _elsewhere = before


def on_post_init(original, self, *args: Any, **kwargs: Any) -> None:
    """Around ``ServerArgs.__post_init__``, which derives everything else from the arguments."""
    fields = {} if _elsewhere else engine_args.fields_for(self, PATCH)
    for name, value in fields.items():
        setattr(self, name, value)
    original(self, *args, **kwargs)


PATCH = for_old_sglang(
    id=f"{FRAMEWORK}.server_args_post_init",
    targets=("sglang.srt.server_args:ServerArgs.__post_init__",),
    wrapper=on_post_init,
    contract=Contract(
        mentions=("self.quantization", "self._handle_missing_default_values"),
        exists=("sglang.srt.utils.hf_transformers_utils:get_config",),
    ),
    evidence="optional",  # imported where an engine starts; verl's driver has others start it
    when=f"called={FRAMEWORK}.launch_scheduler_processes",
    scope=frozenset({"driver"}),
    needs=(f"{FRAMEWORK}.initialize_model",),
    why=engine_args.PATCH.why,
    how="Sets quantization if it is unset, the checkpoint is not quantized and the model is not excluded.",
)
