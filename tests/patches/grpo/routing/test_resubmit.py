"""Which errors of a server mean that it is dead, which that Ray cannot reach it, and which are the request's own."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from flashpatch.patches.grpo.routing import resubmit

pytestmark = pytest.mark.verl


class Balancer:
    """Record what it is told, as a Ray actor would be."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def __getattr__(self, name: str):
        async def remote(*given):
            self.told.append((name, *given))

        return SimpleNamespace(remote=remote)


def told(error: Exception) -> list[tuple]:
    balancer = Balancer()
    client = SimpleNamespace(_load_balancer=balancer)
    asyncio.run(resubmit._report(client, "a", resubmit.lost(error) == resubmit.UNREACHED))
    return balancer.told


def test_a_server_that_cannot_be_reached_rests():
    """One that Ray could not reach for a moment was removed for good."""
    error = ActorUnavailableError("a connection broke", None)
    assert resubmit.lost(error) and told(error) == [("rest_server", "a", 30.0)]


def test_a_dead_server_is_removed_and_an_error_of_the_request_is_the_requests():
    assert resubmit.lost(ActorDiedError()) and told(ActorDiedError()) == [("remove_servers", ["a"])]
    assert resubmit.lost(ValueError("prompt too long")) is None
    assert resubmit.lost(RayTaskError("generate", "", ValueError("prompt too long"))) is None
