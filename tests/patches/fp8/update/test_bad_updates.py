"""Bad weights, dead senders and failing steps: the old policy, or no generation until a complete update."""

import threading

import fp8_toys as toys
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having

A, B = toys.checkpoint(0), toys.checkpoint(1)


@pytest.mark.parametrize("method", ["transposed", "handled"])
def test_failing_anywhere_leaves_the_old_policy_under_atomic_model(method):
    engine = toys.Engine(toys.Model(method), toys.checkpoint(0, scales=True), atomic="model")
    weights = toys.checkpoint(1, scales=True)
    before, answers = toys.state(engine.model), engine.model(toys.TOKENS)
    for index in range(len(weights)):
        with pytest.raises(ConnectionError) as caught:
            engine.load(toys.broken_off(weights, index))
        assert "the old policy stays in place" in caught.value.__notes__[0]
        after = toys.state(engine.model)
        assert toys.same_places(before, after) and toys.same_bits(before, after)
        assert torch.equal(engine.model(toys.TOKENS), answers)
        assert engine.managed.may_generate and engine.managed.version == 0
    assert engine.takes(weights, method)


@pytest.mark.parametrize("missing", range(len(B)))
def test_what_did_not_come_is_named(missing, atomic):
    engine = toys.engine(atomic=atomic)
    before = toys.state(engine.model)
    engine.load(B[:missing] + B[missing + 1 :])
    assert engine.managed.policy().missing == B[missing][0]
    with pytest.raises(PatchError, match=rf"incomplete: {B[missing][0]} did not come"):
        engine.managed.finish()
    engine.check_failed(before)
    assert engine.takes(B)


def test_names_of_which_the_loader_knows_none_are_no_update(atomic, monkeypatch):
    engine = toys.engine(atomic=atomic)
    monkeypatch.setattr(toys.Model, "load_weights", lambda self, sent: {*dict(sent)} & {*dict(B)})
    engine.managed.begin()
    engine.load([(f"module.{name}", value) for name, value in B])
    with pytest.raises(PatchError, match=r"has a place in the model: module\.embed"):
        engine.managed.finish()


def test_what_failed_first_is_told_first(atomic):
    """Also if what is left of the sync comes after it; a named update begins anew."""
    engine = toys.engine(atomic=atomic)
    name, value = B[2]
    with pytest.raises(PatchError, match="came as"):
        engine.load([(name, value[:-1])])
    engine.load(B[:1])
    why = engine.managed.policy().why_refused()
    if atomic == "layer":
        assert why.startswith(f"the last update failed: {name} came as") and "; since then " in why
    assert "did not come" in why and not why.endswith(".")
    engine.managed.begin()
    engine.load(B[:1])
    assert engine.managed.policy().why_refused().startswith("an update is incomplete")


def sharded(tensor):
    """A DTensor of a process group of one."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])


def change(name, to):
    return [(key, to(value) if key == name else value) for key, value in B]


@pytest.mark.parametrize(
    "to,error",
    [
        (lambda t: t[:-1], PatchError),
        (lambda t: t.to(torch.int32), PatchError),
        (lambda t: t.to(torch.bool), PatchError),
        (lambda t: t.to(torch.complex64), PatchError),
        (lambda t: t.to(torch.float8_e4m3fn), PatchError),
        (lambda t: torch.full_like(t, torch.nan), PatchError),
        (lambda t: t / 0, PatchError),
    ],
    ids=["shape", "int", "bool", "complex", "fp8", "nan", "inf"],
)
def test_values_that_cannot_be_weights(to, error, atomic):
    engine = toys.engine(atomic=atomic)
    before = toys.state(engine.model)
    with pytest.raises(error):
        engine.update(change("layers.1.k.weight", to))
    engine.check_failed(before)
    assert engine.takes(B)


@pytest.mark.parametrize(
    "to,says",
    [
        (lambda t: t.float().numpy(), r"a numpy.ndarray.*torch\.from_numpy"),
        (lambda t: t.to_sparse(), r"a torch.sparse_coo tensor.*to_dense"),
        (lambda t: t.float().to_mkldnn(), r"a torch._mkldnn tensor.*to_dense"),
        (lambda t: torch.quantize_per_tensor(t.float(), 0.01, 0, torch.qint8), r"a .*qint8.*dequantize"),
        (lambda t: torch.nested.nested_tensor([t]), r"a nested tensor.*dense"),
        (sharded, r"a DTensor.*full_tensor\(\)"),
    ],
    ids=["numpy", "sparse", "mkldnn", "quantized", "nested", "sharded"],
)
def test_what_is_no_dense_tensor_is_refused_in_plain_words(to, says, atomic):
    """torch's own speak of what a loader does: mixed torch.Tensor and DTensor."""
    engine = toys.engine(atomic=atomic)
    before = toys.state(engine.model)
    with pytest.raises(PatchError, match=rf"(?s)layers\.1\.k\.weight came as {says}"):
        engine.update(change("layers.1.k.weight", to))
    engine.check_failed(before)
    assert engine.takes(B)


class Wrapper(torch.Tensor):
    """Has its values in another tensor, and no memory, and does not say so by ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(cls, lambda one: one.inner, args), **(kwargs or {}))


@pytest.mark.parametrize("to", [Wrapper, lambda t: torch._neg_view(-t)], ids=["wrapper", "negative view"])
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_values_that_do_not_lie_in_the_tensor_s_memory_are_taken(to, tied, atomic):
    """A process that read a wrapper's memory ended by SIGSEGV."""
    engine = toys.engine(tied=tied, atomic=atomic)
    sent = toys.checkpoint(1, tied=tied)
    engine.update([(name, to(value)) for name, value in sent])
    assert toys.same_answers(engine.model, toys.fresh("transposed", sent, tied))


def test_integers_that_a_loader_copies_by_the_list_are_refused():
    def by_list(param, loaded):
        torch._foreach_copy_([param.data], [loaded])

    model = toys.Model("transposed")
    model.layers[1].norm.weight.weight_loader = by_list
    engine = toys.Engine(model, A)
    with pytest.raises(PatchError, match="was given int32 values"):
        engine.update(change("layers.1.norm.weight", lambda t: t.to(torch.int32)))
    engine.update(B)
    assert toys.same_answers(model, toys.fresh("transposed", B))


def test_a_tensor_twice_in_one_call_is_refused():
    engine = toys.engine()
    with pytest.raises(PatchError, match="layers.0.down.weight came twice"):
        engine.load([*B, B[4]])


def test_processing_that_fails(atomic):
    engine = toys.engine(atomic=atomic)
    before = toys.state(engine.model)
    engine.fail_to_process(B)
    assert toys.same_places(before, toys.state(engine.model))
    engine.check_failed(before)
    assert engine.takes(B)


@pytest.mark.parametrize("method", toys.METHODS)
def test_a_commit_that_fails_at_its_end_is_undone_or_broken(method, atomic):
    engine = toys.engine(method, atomic=atomic)
    before = toys.state(engine.model)

    def fails(undo):
        raise MemoryError("the last step failed")

    engine.managed._hooks.run = fails
    with pytest.raises(MemoryError) as caught:
        engine.update(B)
    assert toys.same_places(before, toys.state(engine.model))
    if atomic == "model":
        assert engine.managed.may_generate and engine.managed.version == 0
        assert toys.same_bits(before, toys.state(engine.model))
        assert toys.same_answers(engine.model, toys.fresh(method, A))
    else:
        assert not engine.managed.may_generate and engine.managed.state == "broken"
        assert "generation is refused" in caught.value.__notes__[0]
    del engine.managed._hooks.run
    assert engine.takes(B, method)


@pytest.mark.parametrize(
    "of,name,value,why",
    [
        ("adapter", "refusal", lambda: "LoRA adapters are enabled", "LoRA adapters are enabled"),
        ("adapter", "busy", lambda: True, "requests are running"),
        ("", "asleep", True, "the engine sleeps"),
    ],
)
def test_no_update_begins(of, name, value, why, atomic):
    engine = toys.engine(atomic=atomic)
    with having(getattr(engine.managed, of, engine.managed), name, value):
        with pytest.raises(PatchError, match=why):
            engine.load(B)
    assert engine.managed.may_generate and engine.takes(B)


def test_an_update_within_a_capture_is_refused(atomic, monkeypatch):
    """By name and before anything is written: the policy in use stays, and the next update is as any."""

    def refused(call):
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(PatchError, match="a CUDA graph is being captured"):
                call()

    engine = toys.engine(atomic=atomic)
    refused(lambda: engine.load(B))
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", A))
    engine.load(B)
    refused(engine.managed.finish)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_a_loader_that_writes_into_the_live_model(atomic):
    engine = toys.engine("bare", atomic=atomic)
    before, live = toys.state(engine.model), engine.model.layers[0].down.weight

    def cheats(weights):
        loaded = engine.model.load_weights(weights)
        live.data.mul_(2)
        return loaded

    with pytest.raises(PatchError, match="straight into layers.0.down.weight"):
        engine.managed.load(cheats, iter(B[:2]))
    engine.check_failed(before)


def test_a_loader_that_replaces_parameters_instead_of_writing_to_them(atomic):
    engine = toys.engine("bare", atomic=atomic)

    def by_data(weights):
        for name, tensor in weights:
            dict(engine.model.named_parameters())[name].data = tensor

    def by_parameter(weights):
        for _, tensor in weights:
            engine.model.layers[0].down.weight = torch.nn.Parameter(tensor, requires_grad=False)

    def beside_another(weights):  # which only the end of the update finds
        engine.model.load_weights([("layers.0.norm.weight", torch.ones(4))])
        by_data(weights)

    for loader in (by_data, by_parameter, beside_another):
        with pytest.raises(PatchError, match=r"layers.0.down.weight .*replace"):
            engine.managed.load(loader, [("layers.0.down.weight", torch.ones(4, 4))])
            assert loader is beside_another and not engine.managed.finish(partial=True)
        assert engine.takes(B, "bare")


def test_a_parameter_that_is_replaced_between_two_calls(atomic):
    """The new values went into the tensor that was there before, which no forward reads."""
    engine = toys.engine("bare", atomic=atomic)
    down = engine.model.layers[0].down
    engine.load(B[:-1])
    old, down.weight = down.weight, torch.nn.Parameter(down.weight.detach().clone(), requires_grad=False)
    if atomic == "model":
        before = old.clone()
        with pytest.raises(PatchError, match="layers.0.down.weight was replaced by another tensor during"):
            engine.update(B[-1:])
        assert torch.equal(old, before) and toys.same_answers(engine.model, toys.fresh("bare", A))
        engine.load(B[:-1])
    engine.update(B[-1:])
    assert toys.same_answers(engine.model, toys.fresh("bare", B))


def test_a_loader_that_writes_out_of_sight(atomic):
    class Threaded(toys.Model):
        def load_weights(self, weights):
            thread = threading.Thread(target=super().load_weights, args=(list(weights),))
            thread.start()
            thread.join()

    engine = toys.Engine(Threaded("bare"), A, atomic=atomic)
    with pytest.raises(PatchError, match="in other threads perhaps"):
        engine.load(B)
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("bare", A))


@pytest.mark.parametrize("how", ["adds", "copies itself", "shifts"])
def test_a_loader_that_reads_before_it_writes_finds_no_number(how, atomic):
    engine = toys.engine(atomic=atomic)
    name, module = next((path, m) for path, m in engine.model.named_modules() if "weight" in m._parameters)
    found = []

    def reading(weights):
        for key, value in weights:
            if not found and key.startswith(name):
                data = module.weight.data
                if how == "adds":
                    data.add_(1)
                elif how == "copies itself":
                    data.copy_(data)
                else:
                    data[:1].copy_(data[1:2])
                found.append(bool(data[:1].isnan().all()))
            yield key, value

    engine.load(reading(B))
    assert found == [True]
