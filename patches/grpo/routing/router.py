"""Route verl's requests by outstanding tokens."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import holding
from flashpatch.patches._shared.verl_config import JobConfig, streams
from flashpatch.patches.grpo.routing.pool import threshold

logger = logging.getLogger("flashpatch.grpo")

ROUTER = "verl.workers.rollout.router"
_MANY = 100_000  # requests that may wait in the balancer at once
_slots: ContextVar[int] = ContextVar("flashpatch_grpo_slots", default=0)
"""Sequences that a server of the job generates at once, while verl makes the balancer; 0: not known."""
_streams: ContextVar[bool] = ContextVar("flashpatch_grpo_streams", default=False)
"""Whether the job trains on groups as they end, while verl makes the balancer."""

patches = Patches("grpo", "verl>=0.9", scope="driver", evidence="optional")


@patches.wrap(
    f"{ROUTER}:get_router_handle",
    relies_on=(
        f"{ROUTER}:RequestLoadBalancer.require_acquire_fields",
        f"{ROUTER}:RequestLoadBalancer.require_release_fields",
        f"{ROUTER}:RequestLoadBalancer.get_total_inflight",
        f"{ROUTER}:GlobalRequestLoadBalancer.get_inflight_count",
    ),
    why="verl's balancer counts requests, not tokens, keeps a conversation on its server however full that "
    "is, and never holds a request back.",
    remove_when="verl's router weighs requests by tokens and has thresholds.",
)
def get_router_handle(
    original,
    servers: dict[str, Any],
    router_config_path: str | None = None,
    full_determinism: bool = False,
    load_balancer_cls: type | None = None,
) -> Any:
    """Make the balancer, through verl's own interface, one that counts outstanding tokens, with a threshold and
    back-pressure. A router that the configuration names stays."""
    options = engine.options("grpo")
    asked = router_config_path or load_balancer_cls or ("full_determinism" if full_determinism else None)
    if asked or not options["router"]:
        logger.warning("grpo leaves routing to verl: %s", asked or "router = false")
        return original(
            servers=servers,
            router_config_path=router_config_path,
            full_determinism=full_determinism,
            load_balancer_cls=load_balancer_cls,
        )
    import ray

    from flashpatch.patches.grpo.routing.balancer import TokenBalancer

    engine.require("grpo")
    ordered = options["longest_first"] and not _streams.get()  # the first groups to end are trained on first
    most = threshold(_slots.get()) if ordered else 0
    return ray.remote(TokenBalancer).options(max_concurrency=_MANY).remote(servers, most, ordered)


@patches.wrap(
    "verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer",
    params=(),
    relies_on=(
        "self.rollout_config",
        "get_router_handle",
        "verl.workers.config.rollout:RolloutConfig.max_num_seqs",
        "verl.workers.config.rollout:RolloutConfig.data_parallel_size",
    ),
    why="Which request comes next can be chosen only among those that no engine has yet, and verl's balancer is not "
    "told how many an engine generates at once.",
    remove_when="verl's router has thresholds.",
)
async def init_global_load_balancer(original, self) -> None:
    """Take max_num_seqs of the rollout's configuration as the threshold of a server, and note the trainer mode."""
    rollout = self.rollout_config
    slots = int(rollout.max_num_seqs or 0) * int(rollout.data_parallel_size or 1)
    asked = streams(JobConfig(self.config, patches.of(get_router_handle).id).get)
    with holding(_slots, slots), holding(_streams, asked):
        await original(self)
