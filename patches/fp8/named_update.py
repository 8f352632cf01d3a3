"""Name begin and end of a weight update for a sender that goes through no function which names them."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.events import PATCH

CALL = "flashpatch_update"
"""Name of a call to an engine's workers, with one of the next three; the last is also the id of the end of SGLang's session."""
BEGIN, FINISH, ABANDON = "begin", "finish", "flashpatch:abandon"

_open: WeakValueDictionary[int, update] = WeakValueDictionary()  # by identity of its engine, which it holds


class update:
    """Make one weight update of what is sent to an engine within: all of it is one policy, or none of it is used.

    >>> with flashpatch.update(llm):
    ...     llm.collective_rpc("my_load_weights", args=(bucket,))  # as often as needed, in any order

    Until the end requests are refused, or with ``atomic="model"`` answered by the old policy. A tensor may come again in another
    call: the last value counts. The end commits, the policy first: an error of a drafter beside it leaves that in place. After an
    exception within what came is given up: with ``atomic="model"`` the old policy serves on,
    with ``atomic="layer"`` requests are refused until a complete update. Either way the next update is taken. In this process
    no second one begins meanwhile. One of another process gives this one up, whose end raises: one sender at a time.

    Args:
        engine: ``vllm.LLM`` or ``LLMEngine``; ``AsyncLLM``, with ``async with``; ``sglang.Engine`` from 0.5.21 on.

    Raises:
        PatchError: at the beginning, if this engine cannot be updated, or not now (another update is open, requests run, it
            sleeps), or if FlashPatch does not follow its weights; at the end, if what came is not one whole policy: it names
            what is missing, or if another update has begun since."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._sender, self._key = engine, uuid4().hex, id(getattr(engine, "llm_engine", engine))

    def __enter__(self) -> None:
        _now(self._begin(later=False))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _now(self._end(error, later=False))

    async def __aenter__(self) -> None:
        await self._begin(later=True)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._end(error, later=True)

    async def _begin(self, later: bool) -> None:
        if _open.setdefault(self._key, self) is not self:
            raise PatchError(
                "another flashpatch.update of this engine is open", patch=PATCH, advice="End it first."
            )
        try:
            await self._say(BEGIN, later)
        except BaseException as error:
            if hasattr(self._engine, "tokenizer_manager"):
                del _open[self._key]  # a session of SGLang's that is open is another sender's
            else:  # another rank may have begun
                await self._end(error, later)
            raise

    async def _end(self, error: BaseException | None, later: bool) -> None:
        try:
            await self._say(FINISH if error is None else ABANDON, later)
        except BaseException as problem:
            if error is None:
                await self._end(problem, later)
                raise
            error.add_note(f"[flashpatch] nor could the update be given up: {problem}")
        finally:
            _open.pop(self._key, None)

    async def _say(self, what: str, later: bool) -> None:
        """Say to all ranks what is to be done; ``later``: the caller can await the engine's answer."""
        try:
            if hasattr(self._engine, "tokenizer_manager"):
                return _say_to_sglang(self._engine, what)
            answer = self._engine.collective_rpc(CALL, args=(what, self._sender))
            if inspect.isawaitable(answer) and not later:
                answer.close()
                raise PatchError(
                    "this engine is asynchronous",
                    patch=PATCH,
                    advice="Write async with flashpatch.update(engine).",
                )
            if inspect.isawaitable(answer):
                await answer
        except PatchError:
            raise
        except Exception as error:
            if CALL not in str(error):
                raise _not_taken(error) from error
            raise PatchError(
                "FlashPatch does not follow the weights of this engine",
                advice="Enable fp8, int8 or bf16 before the engine is opened.",
            ) from error


def _now(steps: Coroutine[Any, Any, None]) -> None:
    """Go through ``steps``, which await nothing."""
    try:
        steps.send(None)
    except StopIteration:
        return


def _not_taken(why: object) -> PatchError:
    return PatchError(
        f"the engine did not take the update: {why}", patch=PATCH, advice="Send a complete update."
    )


def _say_to_sglang(engine: Any, what: str) -> None:
    if not hasattr(engine, "begin_weight_update"):
        raise PatchError(
            "this version of SGLang has no update sessions", patch=PATCH, advice="Use SGLang 0.5.21 or newer."
        )
    if what == ABANDON:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        request = EndWeightUpdateReqInput(rid=ABANDON)
        engine.loop.run_until_complete(engine.tokenizer_manager.end_weight_update(request, None))
        return
    done, message = engine.begin_weight_update() if what == BEGIN else engine.end_weight_update()
    if not done:
        raise _not_taken(message)
