"""Put a LoRA adapter in place on all ranks of a vLLM engine, or on none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import all_ranks
from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.update.events import ASLEEP, REQUESTS_RUN
from flashpatch.patches.fp8.vllm import unsupported

if TYPE_CHECKING:
    from flashpatch.patches.fp8.lora.adapters import Adapters
    from flashpatch.patches.fp8.update.events import Policy

MANAGER = "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager"
BASE = "vllm.lora.worker_manager:WorkerLoRAManager"
MODELS = "vllm.lora.model_manager:LoRAModelManager"

_followed: weakref.WeakKeyDictionary[Any, Adapters] = weakref.WeakKeyDictionary()


def of(runner: Any) -> Adapters | None:
    """Return the adapters of a model runner; None if it has none, or none that are followed."""
    manager = getattr(runner, "lora_manager", None)
    return None if manager is None else _followed.get(manager)


def report(runner: Any, named: Collection[int]) -> list[Policy]:
    """Return what the engine core must know of the adapters, which are then those in vLLM's cache and those ``named`` by requests."""
    adapters = of(runner)
    if adapters is None:
        return []
    adapters.keep_only(runner.lora_manager.list_adapters() | set(named))
    return [adapters.policy()]


def bring(worker: Any, lora_request: Any) -> str:
    """Load an adapter that a request names before anything is scheduled for it; return why that fails, or an empty string."""
    try:
        worker.model_runner.lora_manager.add_adapter(lora_request)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def write_again(runner: Any) -> None:
    """Write the adapters into the engine's memory once more, of which a sleep has left nothing."""
    if of(runner) is None:
        return
    models = runner.lora_manager._adapter_manager
    restore = _snapshot(models)
    for module in models.modules.values():
        for slot in range(models.lora_slots):
            module.reset_lora(slot)
    restore()


patches = Patches(
    "fp8",
    "vllm>=0.24",
    framework="vllm_lora",
    scope="worker",
    evidence="optional",  # an engine may have no adapters
    remove_when="vLLM stages an adapter, checks it, and puts it in place on all ranks or on none.",
)


@patches.wrap(
    f"{MANAGER}.create_lora_manager", why="The ranks of an engine must agree on an adapter, as on weights."
)
def create_lora_manager(original, self, model: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Give each rank's manager an account of its adapters, if the model's weights are followed beside adapters."""
    result = original(self, model, vllm_config, *args, **kwargs)
    managed = model_registry.get(model)
    if managed is not None and self not in _followed and unsupported.adapters(vllm_config) is None:
        from flashpatch.patches.fp8.lora.adapters import Adapters

        _followed[self] = Adapters(managed.adapter.make_consensus("lora"))
        if _report_failed_call not in all_ranks.on_failure:
            all_ranks.on_failure.append(_report_failed_call)
    return result


@patches.wrap(
    f"{MANAGER}.add_adapter",
    relies_on=(
        "self._load_adapter",
        "self._adapter_manager.remove_adapter",
        "lora_request.load_inplace",
        "vllm.lora.request:LoRARequest.load_inplace",
        "vllm.lora.utils:get_adapter_absolute_path",
        f"{MODELS}._get_lora_layer_weights",
        f"{MODELS}.remove_all_adapters",
        f"{MODELS}.activate_adapter",
        "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
    ),
    why="vLLM fills a smaller adapter into a larger place, leaves out modules that it does not know, takes NaN, scales the "
    "sender's own tensors, and keeps what a name meant before in its prefix cache; a rank that fails is left behind.",
    upstream="vLLM RFC #48297",
)
def add_adapter(original, self, lora_request: Any) -> bool:
    """Load an adapter beside the one in place, check it against the engine's layers, agree over the ranks, replace it,
    agree again, and else put the one from before back.

    Every step passes here with the adapters of its requests; one that is held is touched, or put in place again if vLLM
    has let it go for others. Raises PatchError if the adapter is refused, on this rank or on another; the adapters from
    before are in place."""
    adapters = _followed.get(self)
    if adapters is None:
        return original(self, lora_request)
    from flashpatch.patches.fp8.vllm_lora import staging

    number, staged = lora_request.lora_int_id, []
    if number in adapters.held and not adapters.asked:  # what requests name is never loaded anew
        with _loaded(self, adapters.models[number]), having(lora_request, "load_inplace", False):
            return original(self, lora_request)
    key = staging.cached_under(lora_request)
    names = lora_request.lora_name, number, lora_request.lora_path, key

    def stage() -> str:
        managed = model_registry.get(self._adapter_manager.model)
        if managed is not None and managed.asleep:
            raise PatchError(ASLEEP[0], patch=patches.of(add_adapter).id, advice=ASLEEP[1])
        staged.append(self._load_adapter(lora_request))
        digest = staging.checked(self._adapter_manager, staged[0], lora_request, patches.of(add_adapter).id)
        if not adapters.asked:
            adapters.check_meaning(key, digest)
        elif adapters.changes(names, digest):
            _check_idle(self, number)
        return digest

    def place() -> bool:
        self._adapter_manager._last_mapping = None  # else vLLM 0.24 computes on with the places of before
        with _loaded(self, staged[0]), having(lora_request, "load_inplace", True):
            return original(self, lora_request)

    result = adapters.replace(names, stage, place, _snapshot(self._adapter_manager))
    adapters.models[number] = staged[0]
    if adapters.kept is not None:
        adapters.kept.discard(number)
    return result


@patches.wrap(
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.add_lora",
    relies_on="self.lora_manager.add_adapter",
    why="A step passes the adapters of its requests to the same function as a sender does; what changes in a step comes after "
    "the prefix cache was asked.",
)
def add_lora(original, self, lora_request: Any) -> bool:
    """Tell an adapter that is sent from one that a step names, under which a name never comes to mean something else."""
    adapters = of(self)
    if adapters is None:
        return original(self, lora_request)
    with having(adapters, "asked", True):
        return original(self, lora_request)


@patches.wrap(
    f"{BASE}.remove_adapter",
    why="verl removes an adapter before its successor has come; if it never does, requests draw from the base.",
)
def remove_adapter(original, self, adapter_id: int) -> bool:
    """Keep an adapter within verl's update until its successor is in place."""
    adapters = _followed.get(self)
    if adapters is None:
        return original(self, adapter_id)
    if adapters.kept is not None:
        adapters.kept.add(adapter_id)
        return adapter_id in self.list_adapters()
    result = original(self, adapter_id)
    adapters.keep_only(adapters.held.keys() - {adapter_id})
    return result


@patches.wrap(
    f"{BASE}.remove_all_adapters", why="vLLM forgets all adapters when its own session replaced the base."
)
def remove_all_adapters(original, self, *args: Any, **kwargs: Any) -> Any:
    """Note in the account that the adapters are gone."""
    result = original(self, *args, **kwargs)
    adapters = _followed.get(self)
    if adapters is not None:
        adapters.keep_only(())
    return result


@contextmanager
def kept_until_replaced(runner: Any) -> Iterator[Adapters | None]:
    """Within, the removal of an adapter waits for its successor: a sender may remove the old one first."""
    adapters = of(runner)
    if adapters is None:
        yield None
        return
    with having(adapters, "kept", set()):
        yield adapters


def _check_idle(manager: Any, number: int) -> None:
    """Raise if requests run under the adapter that is to be replaced, unless the option in_flight allows it."""
    if engine.options("fp8")["in_flight"] != "refuse":
        return
    model = manager._adapter_manager.model
    managed, runner = model_registry.get(model), model_registry.owner(model)
    if managed is None or not managed.adapter.busy():
        return
    states = getattr(runner, "requests", None)
    if states is not None:
        under = (getattr(state, "lora_request", None) for state in states.values())
        if all(request is None or request.lora_int_id != number for request in under):
            return
    raise PatchError(
        f"{REQUESTS_RUN} under the LoRA adapter {number}, so its replacement is refused",
        patch=patches.of(add_adapter).id,
        advice="Wait for them, give the new adapter a name and number of its own, or set the option in_flight to abort, "
        "recompute or keep.",
    )


def _loaded(manager: Any, adapter: Any) -> AbstractContextManager[None]:
    """Within, the manager takes ``adapter`` for what it would load."""
    return having(manager, "_load_adapter", lambda request: adapter)


def _snapshot(models: Any) -> Callable[[], None]:
    """Return a function that gives vLLM's ``LoRAModelManager`` the adapters back that it has now."""
    registered = dict(models.list_adapters())
    active = list(models._active_adapters)

    def restore() -> None:
        models.remove_all_adapters()
        for adapter in registered.values():
            models.add_adapter(adapter)
        for number in active:
            models.activate_adapter(number)

    return restore


def _report_failed_call(call: int, error: str) -> None:
    """Report to the other ranks that a call failed here, perhaps before an adapter came to be staged."""
    for adapters in list(_followed.values()):
        adapters.consensus.announce_failed_call(call, error)
