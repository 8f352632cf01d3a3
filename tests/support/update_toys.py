"""Toys under the real core, driven beside the specification: each call's end, each answer and each value are compared."""

from __future__ import annotations

import dataclasses
import functools
import threading

import fp8_toys as toys
import torch
import torch.distributed as dist
from update_spec import ANSWERED, EITHER, ERROR, NONE, REFUSED, SPOILED, Spec

from flashpatch.patches.fp8.update.ranks import RankConsensus

NAMES = tuple(name for name, _ in toys.checkpoint(0, blocks=1))
BUFFERS = tuple(name for name in NAMES if name.endswith(".bias"))
EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
#: What is put in place together.
LAYERS = {
    name: "qkv" if name.split(".")[-2] in ("q", "k", "v") else name.rpartition(".")[0] for name in NAMES
}
METHODS = ("bare", "transposed", "closure", "handled")  # which leave values as they are


@dataclasses.dataclass(frozen=True)
class Options:
    """How a toy is opened; ``ties``: "", "made" at construction, or "found" after the first load."""

    atomic: str = "layer"
    method: str = "transposed"
    ties: str = ""
    dummy: bool = False
    ranks: int = 1


@functools.cache
def pattern(name: str, number: int | str, tied: bool) -> torch.Tensor:
    """The tensor that stands for a number: no two names and no two numbers have the same."""
    place = NAMES.index(EMBEDDING if tied and name == HEAD else name) + 1
    shape = dict(toys.checkpoint(0, blocks=1))[name].shape
    return torch.full(shape, float("nan") if number == SPOILED else number + place / 16)


class Sender(Exception):
    """A sender that raises."""


class Rank(RankConsensus):
    """Of two in this process, each in a thread."""

    def __init__(self, rank: int, store: dist.Store, toy: Toy) -> None:
        super().__init__((0, 1), rank=rank, name="toy", call=lambda: toy.calls)
        self._base, self._shared = "toy", store

    def _store(self) -> dist.Store:
        return self._shared


class Toy:
    """A model under the core, on one rank or two, and its specification. Each method is one call of both.

    Attributes:
        raised: the error of the last call, of each rank; empty if there was none.
        calls: how many there were."""

    def __init__(self, options: Options) -> None:
        self.options, self.tied = options, bool(options.ties)
        self.raised: list[BaseException] = []
        self.calls = 0
        store = dist.HashStore()
        self.engines = [self._engine(rank, store) for rank in range(options.ranks)]
        self.managed = [engine.managed for engine in self.engines]
        owners = {HEAD: EMBEDDING} if self.tied else {}
        unseen, opened = (BUFFERS, None) if options.dummy else ((), 0)
        self.spec = Spec(LAYERS, options.atomic, owners, unseen, opened)
        self._versions = [0] * options.ranks, 0

    def _engine(self, rank: int, store: dist.Store) -> toys.Engine:
        options = self.options
        first = None if options.dummy else [(name, pattern(name, 0, self.tied)) for name in NAMES]
        model = toys.Model(options.method, 1, options.ties == "made")
        more = {"consensus": Rank(rank, store, self)} if options.ranks > 1 else {}
        return toys.Engine(model, first, self._processed, atomic=options.atomic, **more)

    def _processed(self, model: toys.Model) -> None:
        toys.process_all(model)
        if self.options.ties == "found":
            model.lm_head.weight = model.embed.weight

    # -- calls ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._call(self.spec.begin(), lambda engine: engine.managed.begin())

    def finish(self, partial: bool = False) -> None:
        self._call(self.spec.finish(partial), lambda engine: engine.managed.finish(partial or None))

    def load(self, items, fault: str = "", asked=()) -> None:
        """One call; ``fault``: how it ends, "raises", "shape" or "unknown"; ``asked``: tensors after which a request comes.

        The faults, and values that cannot be, are those of the last rank alone."""
        last = self.engines[-1]

        def stream(engine):
            for place, (name, number) in enumerate(items):
                here = number if engine is last or number != SPOILED else 1
                yield from self._tensors(name, here)
                if place in asked:
                    self._ask_within(engine)
            if fault and engine is last:
                if fault == "raises":
                    raise Sender
                yield ("nobody.weight" if fault == "unknown" else NAMES[1]), torch.ones(3, 3)

        def call(engine):
            engine.load(stream(engine))
            engine.managed.after_call()

        self._call(self.spec.load(items, bool(fault)), call)

    def request(self) -> bool:
        """A request comes; return whether it is answered."""
        self._call(self.spec.request(), lambda engine: engine.managed.before_request())
        return self.managed[0].may_generate

    def withdraw(self) -> None:
        """Close an update that has brought nothing."""
        self.calls += 1
        empty = self.spec.open == "named" and not self.spec.came
        if empty:
            self.spec.finish()
        assert {one.close_if_empty() for one in self.managed} == {empty}, self
        self.check()

    def discard(self) -> None:
        self.calls += 1
        for engine in self.engines:
            engine.managed.mark_discarded()
            for tensor in engine.model.parameters():
                tensor.data.fill_(-1.0)
        self.spec.discard()
        self.check()

    def sleep(self, asleep: bool) -> None:
        self.calls += 1
        self.spec.asleep = asleep
        for one in self.managed:
            one.asleep = asleep

    def _call(self, due: str, action) -> None:
        self.calls += 1
        ended: list[BaseException | None] = [None] * len(self.engines)

        def run(rank: int) -> None:
            try:
                action(self.engines[rank])
            except Exception as error:
                ended[rank] = error

        if len(ended) == 1:
            run(0)
        else:
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ended))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.raised = [error for error in ended if error is not None]
        for error in ended:
            if isinstance(error, AssertionError) and getattr(error, "meant", False):
                raise error
            expected = (EITHER, NONE if error is None else ERROR)
            assert due in expected, f"{due} was due, not {error!r}; {self}"
        assert len(self.raised) in (0, len(ended)), f"ranks differ: {ended}; {self}"
        self.spec.ended(bool(self.raised))
        self.check()

    def _tensors(self, name: str, number: int | str) -> list[tuple[str, torch.Tensor]]:
        return [(name, pattern(name, number, self.tied))]

    # -- what is there -------------------------------------------------------------------------------------

    def _ask_within(self, engine: toys.Engine) -> None:
        """A request inside a call: it changes nothing, and meets the old policy or none."""
        engine.managed.before_request()
        fits = self.options.atomic == "model" and self.spec.open == "named"
        if engine.managed.may_generate and not (fits and not self.differs(engine)):
            error = AssertionError(f"a request within a call is answered; {self}")
            error.meant = True
            raise error

    def check(self) -> None:
        """Version, answer and values are those of the specification, on each rank."""
        spec, versions = self.spec, [one.version for one in self.managed]
        known, commits = self._versions
        assert len(set(versions)) == 1 and (versions == known) == (commits == spec.version), (
            f"{versions}; {self}"
        )
        assert len(versions) > 1 or versions == [spec.version], f"{versions}; {self}"
        self._versions = versions, spec.version
        for engine in () if spec.asleep else self.engines:
            answers = engine.managed.may_generate
            assert spec.answers != (REFUSED if answers else ANSWERED), (
                f"answers: {answers}, due: {spec.answers}; {self}"
            )
            assert answers or engine.managed.policy().why_refused(), self
            assert not answers or not self.differs(engine), f"values: {self.differs(engine)}; {self}"

    def differs(self, engine: toys.Engine) -> dict:
        """What an engine has in place that is not of the policy committed last."""
        live, spec = self.live(engine), self.spec
        served = {name: spec.served[owner] for name, owner in spec.owner.items() if owner in spec.served}
        return {name: live[name] for name, number in served.items() if live[name] != number}

    def live(self, engine: toys.Engine | None = None) -> dict[str, int | None | str]:
        """Name -> the number that the model in use has there; None: as it was made; text: no number's."""
        model = (engine or self.engines[0]).model
        eye, block = torch.eye(toys.HIDDEN), model.layers[0]
        q, k, v = block.qkv(eye).T.chunk(3)
        found = {"q.weight": q, "k.weight": k, "v.weight": v, "down.weight": block.down(eye).T}
        found |= {"norm.weight": block.norm.weight, "norm.bias": block.norm.bias}
        found = {f"layers.0.{name}": tensor for name, tensor in found.items()}
        found |= {EMBEDDING: model.embed.weight[: toys.VOCAB], HEAD: model.lm_head.weight[: toys.VOCAB]}
        return {name: self._number(name, tensor) for name, tensor in found.items()}

    def _number(self, name: str, tensor: torch.Tensor) -> int | None | str:
        if not tensor.any():
            return None
        number = int(tensor.flatten()[0].nan_to_num(-1).floor())
        same = torch.equal(tensor, pattern(name, number, self.tied))
        return number if same else f"no number: {tensor.tolist()}"

    def __str__(self) -> str:
        return f"{self.options}, {self.managed[0].policy()}, {vars(self.spec)}"
