"""A toy model under the transaction beside its `Spec`, and the checks that hold after every call."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fp8_toy_derived as derived
import fp8_toys as toys
import torch
from fp8_toy_methods import METHODS
from fp8_update_spec import FAILS, OK, Policy, Spec

from flashpatch.patches.fp8 import model_registry

BLOCKS = 1


class Stopped(BaseException):
    """Ends a sender in the way of KeyboardInterrupt, which no ``except Exception`` sees."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How a model is made and opened; ``dummy``: on dummy weights."""

    method: str = "transposed"
    kind: str = "plain"
    atomic: str = "layer"
    partial: bool = False
    tied: bool = False
    scales: bool = False
    dummy: bool = False

    def model(self) -> derived.Model:
        """A model as its constructor leaves it."""
        make = derived.Hooked if self.kind == "hooked" else derived.Model
        return make(self.method, BLOCKS, self.tied, self.kind)

    def checkpoint(self, seed: int, scales: bool | None = None) -> dict[str, torch.Tensor]:
        """Name to tensor; ``scales``: whether attention scales are among them, as in the first by default."""
        return _checkpoint(
            seed, self.kind, self.tied, self.scales if scales is None else scales, not self.dummy
        )


@functools.cache
def _checkpoint(seed: int, kind: str, tied: bool, scales: bool, buffers: bool) -> dict[str, torch.Tensor]:
    return derived.checkpoint(seed, BLOCKS, kind, tied, scales, buffers)


def open_model(model: derived.Model, config: Config, policy: Policy) -> None:
    """Load a policy, dummy weights where it has none, and post-process."""
    with torch.no_grad():
        if config.dummy:
            random = torch.Generator().manual_seed(7)
            for tensor in model.parameters():
                if tensor.dim():
                    tensor.uniform_(-1e-1, 1e-1, generator=random)
        if policy:
            model.load_weights([(name, tensor_of(config, name, seed)) for name, seed in policy.items()])


def tensor_of(config: Config, name: str, seed: int | None) -> torch.Tensor:
    """A tensor of a checkpoint; NaN where ``seed`` is None."""
    if seed is None:
        return torch.full_like(config.checkpoint(0, scales=True)[name], torch.nan)
    return config.checkpoint(seed, scales=True)[name]


@functools.cache
def _fresh_answer(config: Config, policy: tuple[tuple[str, int], ...]) -> torch.Tensor:
    model = config.model()
    open_model(model, config, dict(policy))
    derived.process_all(model)
    return model(toys.TOKENS)


def fresh_answer(config: Config, policy: Policy) -> torch.Tensor:
    """The answer of a model that has only ever seen this policy."""
    clean = dataclasses.replace(config, atomic="layer", partial=False)
    return _fresh_answer(clean, tuple(sorted(policy.items())))


class Runner:
    """What owns the models of one engine."""


class Unit:
    """One model of an engine."""

    def __init__(self, config: Config, runner: Runner, role: str = "target") -> None:
        self.config, self.runner, self.role = config, runner, role
        first = {} if config.dummy else dict.fromkeys(config.checkpoint(0), 0)
        self.model = config.model()
        self.fault: Callable[[torch.nn.Module], None] | None = None
        with model_registry.owned_by(runner):
            self.managed = toys.manage(
                self.model, config.atomic, config.partial, role=role, process=self._process
            )
            model_registry.add(self.model, self.managed)
        open_model(self.model, config, first)
        derived.process_all(self.model)
        self.managed.end_first_load()
        self.model.fault = self._inject
        layers = {name: _layer(name) for name in config.checkpoint(0, scales=True)}
        deferred = {layer for layer in layers.values() if layer.endswith(".attn")}
        if config.dummy:  # their buffers may come yet
            deferred |= {layer for layer in layers.values() if layer.endswith(".norm")}
        required = config.checkpoint(0, scales=config.scales and not config.dummy)
        self.spec = Spec(layers, required, deferred, first, config.atomic, config.partial, config.dummy)
        self.places = toys.state(self.model)
        self.bits: dict | None = self.places
        self.versions: dict[int, Policy] = {}
        self.sender: list[tuple[str, int | None]] = []  # what a sender has still to send
        self.check()

    def fail_at(self, step: int) -> None:
        """Let the post-processing fail when it is called for the ``step``-th time."""
        calls = itertools.count(1)

        def fault(module: torch.nn.Module) -> None:
            if next(calls) == step:
                raise MemoryError("no room to repack")

        self.fault = fault

    def _inject(self, module: torch.nn.Module) -> None:
        if self.fault is not None:
            self.fault(module)

    def _process(self, module: torch.nn.Module) -> None:
        self._inject(module)
        toys.process(module)

    def call(self, expected: str, action: Callable[[], Any], faulty: bool = False) -> BaseException | None:
        """Do ``action``, of which the spec expects an outcome; with ``faulty`` it may also fail."""
        error: BaseException | None = None
        try:
            action()
        except (Exception, Stopped) as problem:
            error = problem
        assert error is not None or expected != FAILS, f"this should have failed; {self}"
        assert error is None or expected != OK or faulty, f"this should have worked: {error!r}; {self}"
        if error is None:
            committed = bool(self.spec._commits)
            self.spec.succeeded()
            self.bits = None if committed else self.bits
        else:
            self.spec.failed()
        self.check()
        return error

    def check(self) -> None:
        """State, version, gate and answer are those of one policy."""
        spec, managed = self.spec, self.managed
        policy = managed.policy()
        assert managed.version == policy.version == spec.version, (policy, str(self))
        assert managed.may_generate == spec.serves, f"serves: {managed.may_generate}, {policy}; {self}"
        by_gate = policy.state == "ready" or (policy.state == "open" and self.config.atomic == "model")
        assert by_gate == managed.may_generate, f"the gate sees {policy}; {self}"
        assert toys.same_places(self.places, toys.state(self.model)), "tensors have moved"
        if not spec.is_open:
            staged = [p.name for layer in managed.layers for p in layer.params if p.tensor is not None]
            assert not staged, f"still staged: {staged}"
        if not spec.serves:
            assert policy.why_refused()
            return
        answer = self.model(toys.TOKENS)
        fits = [p for p in spec.served if torch.equal(answer, fresh_answer(self.config, p))]
        assert fits, f"the answer is of no policy that was committed; {self}"
        spec.served = fits[:1]
        assert self.versions.setdefault(spec.version, fits[0]) == fits[0]
        if self.config.atomic == "model":
            now = toys.state(self.model)
            assert self.bits is None or toys.same_bits(self.bits, now), "the old policy has changed"
            self.bits = now

    def tensors(self) -> Iterable[torch.Tensor]:
        """What lies on the device, apart from the registered buffers, which vLLM saves over a sleep."""
        buffers = {tensor.untyped_storage()._cdata for tensor in self.model.buffers()}
        found = (*self.model.parameters(), *self.managed.constants())
        return [tensor for tensor in found if tensor.untyped_storage()._cdata not in buffers]

    def __str__(self) -> str:
        return f"{self.role} {self.config}, {vars(self.spec)}"


def sleeping(units: list[Unit]) -> Callable[..., None]:
    """vLLM's sleep at level 2, as an emulator: the device's memory holds something else afterwards."""

    def sleep(worker: Any, level: int) -> None:
        with torch.no_grad():
            for unit in units:
                for tensor in unit.tensors():
                    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    raw.copy_(torch.arange(raw.numel()) * 37 + 11)

    return sleep


def _layer(name: str) -> str:
    parts = name.removesuffix(".weight").removesuffix(".bias").split(".")
    if parts[-1] in ("q", "k", "v"):
        parts[-1] = "qkv"
    if parts[-1] in ("k_scale", "sinks"):
        parts.pop()
    return ".".join(parts)


def broken_off(items: list, error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    """The items, then the sender ends."""
    yield from items
    raise error


def misfit(config: Config, name: str, seed: int, how: str) -> tuple[str, torch.Tensor]:
    """A tensor that no loader may accept: of an unknown name, another shape or dtype."""
    tensor = tensor_of(config, name, seed)
    if how == "unknown":
        return f"{name}.nonsense", tensor
    if how == "dtype":
        return name, tensor.to(torch.int32)
    return name, tensor[..., :-1] if tensor.dim() else tensor.repeat(2)


def raised(action: Callable[[], Any]) -> Exception | None:
    """What ``action`` raises, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def like(config: Config, other: Config) -> Config:
    """``config`` with the options of ``other``."""
    return dataclasses.replace(config, atomic=other.atomic, partial=other.partial)


METHOD_NAMES = tuple(METHODS)
