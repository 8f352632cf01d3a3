"""A session opens once the server's last requests are gone: SGLang sends an answer before it removes the request."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.events import REQUESTS_RUN
from flashpatch.patches.fp8.verl_sglang import http_engine

RUNNING, BROKEN = PatchError(f"{REQUESTS_RUN}, so the update is refused"), PatchError("no such model")


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a session on a server that gives these answers; the calls that it got."""

    def with_answers(answers: Iterator[Any], seconds: float = 60.0) -> list[Any]:
        calls = []

        async def post(adapter: Any, endpoint: str, payload: dict[str, Any], patch: str = ""):
            calls.append((endpoint, payload))
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(http_engine, "post", post)
        monkeypatch.setattr(http_engine, "BUSY_SECONDS", seconds)
        counted: list[str] = []
        monkeypatch.setattr(http_engine.engine, "record_call", counted.append)
        asyncio.run(http_engine.begin_weight_update(object(), "target", "sync-1"))
        assert counted == [http_engine.patches.of(http_engine.async_http_server_adapter).id]
        return calls

    return with_answers


def test_it_asks_again_while_requests_run(begin: Any) -> None:
    calls = begin(iter([RUNNING, RUNNING, {}]))
    assert calls == 3 * [("begin_weight_update", {"selector": "target", "rid": "sync-1"})]


def test_requests_that_go_on_are_the_servers_refusal_and_another_is_raised_at_once(begin: Any) -> None:
    with pytest.raises(PatchError, match=REQUESTS_RUN):
        begin(iter(lambda: RUNNING, None), seconds=0.3)
    with pytest.raises(PatchError, match="no such model"):
        begin(iter([BROKEN]))
