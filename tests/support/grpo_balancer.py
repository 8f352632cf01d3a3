"""grpo's balancer with handles that are letters, for tests that need no Ray."""

from typing import Any

from flashpatch.patches.grpo.routing.balancer import TokenBalancer


def balancer(servers: str = "ab", **options: Any) -> TokenBalancer:
    """A balancer of servers with names of one letter."""
    return TokenBalancer({name: name.upper() for name in servers}, **options)
