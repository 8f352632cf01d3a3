"""Steps of `sglang_job` that need SGLang and no engine."""

import sys
from typing import Any


def arguments(given: dict[str, Any]) -> list[Any]:
    """What SGLang's own resolution makes of arguments: the quantization, or the error's name and message."""
    from sglang.srt.server_args import ServerArgs

    try:
        args = ServerArgs(**given)
        if not hasattr(args, "resolve_once"):  # before 0.5.20 it resolves itself
            return [args.quantization, ""]
        from sglang.srt.arg_groups.overrides import resolution_result

        args.resolve_once()
        return [resolution_result(args, "quantization"), ""]
    except Exception as error:
        return [type(error).__name__, str(error)]


def states(family: str, framework: str) -> list[str]:
    """The states of a family's patches for a framework while it is on, and SGLang's modules are imported."""
    import flashpatch
    from flashpatch import engine

    flashpatch.enable(family)
    try:
        import sglang.srt.managers.scheduler  # noqa: F401

        found = engine.statuses().items()
        engine.require(family)
        return [str(status.state) for id, status in found if id.startswith(f"{family}.{framework}.")]
    finally:
        flashpatch.disable(family)


def certify(model: str, engine: dict[str, Any], syncs: int = 0) -> dict[str, Any]:
    """How SGLang, its runner opened in this process, compares with the trainer's model."""
    from flashpatch.verify.exact import command

    return command.certify(model, "", engine, syncs, "sglang").as_json()


class _Scheduler:
    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return True

    def flush_cache(self) -> bool:
        return True


def embeddings() -> list[int]:
    """Embeddings of images that SGLang has, before and after a flush that is due, and whether it was."""
    import torch
    from sglang.srt.managers import mm_utils
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    from flashpatch.patches.fp8.sglang import schedulers

    mm_utils.init_mm_embedding_cache(1 << 20)
    cache = sys.modules[mm_utils.init_mm_embedding_cache.__module__].embedding_cache
    cache.set(1, EmbeddingResult(embedding=torch.ones(4, 8)))
    return [len(cache), schedulers.flush(_Scheduler()), len(cache)]


BARE = {bare.__name__: bare for bare in (arguments, states, certify, embeddings)}
