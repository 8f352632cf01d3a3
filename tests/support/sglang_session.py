"""Send an update to an SGLang engine, of whichever generation, and open and end the session around it."""

from typing import Any


def begin(engine: Any, selector: str = "all", sync: str = "") -> list[Any]:
    """Open a session; the answer. Before 0.5.20 SGLang has none, and FlashPatch's are for the target alone."""
    settle(engine)
    if not has_sessions(engine):
        from flashpatch.patches._shared import sglang_sessions

        return list(_post(engine, sglang_sessions.begin(sync)))
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    request = BeginWeightUpdateReqInput(selector=selector, rid=sync or None)
    return list(_wait(engine, engine.tokenizer_manager.begin_weight_update(request, None)))


def end(engine: Any) -> list[Any]:
    """End it; the answer."""
    if has_sessions(engine):
        return list(engine.end_weight_update())
    from flashpatch.patches._shared import sglang_sessions

    return list(_post(engine, sglang_sessions.end()))


def settle(engine: Any) -> None:
    """Wait for one round of the scheduler: until then it counts a request as running whose last token it has sent."""
    engine.get_server_info()


def has_sessions(engine: Any) -> bool:
    """Whether SGLang's own engine has them."""
    return hasattr(engine, "begin_weight_update")


def serialized(engine: Any, bucket: Any) -> list[Any]:
    """One bucket for each rank."""
    if has_sessions(engine):
        return engine._serialize_tensors_per_rank(bucket, None)
    from sglang.srt.utils import MultiprocessingSerializer

    return [MultiprocessingSerializer.serialize(bucket) for _ in range(engine.server_args.tp_size)]


def send(engine: Any, payload: list[Any], selector: str = "all", **more: Any) -> list[Any]:
    """Send one bucket that `serialized` made; the answer."""
    role = dict(selector=selector) if has_sessions(engine) else dict(disable_draft_model=selector == "target")
    return list(_post(engine, dict(serialized_named_tensors=payload, flush_cache=False, **role, **more)))


def _post(engine: Any, fields: dict[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(**fields)
    return _wait(engine, engine.tokenizer_manager.update_weights_from_tensor(request, None))


def _wait(engine: Any, answer: Any) -> Any:
    return engine.loop.run_until_complete(answer)
