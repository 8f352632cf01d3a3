"""The transaction around ``load_weights``, against a model that has only ever seen the new weights."""

import itertools
import random
import threading

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit.managed_model import ManagedModel

A, B = toys.checkpoint(0), toys.checkpoint(1)


@pytest.fixture(params=list(toys.METHODS))
def method(request) -> str:
    return request.param


@pytest.fixture(params=["layer", "model"])
def atomic(request) -> str:
    return request.param


def test_the_first_load_learns_what_a_checkpoint_brings():
    engine = toys.engine("bare")
    params = {param.name: param for layer in engine.managed.layers for param in layer.params}
    assert params["layers.0.qkv.weight"].expected.covered == 3 * toys.HIDDEN**2
    assert list(params["layers.0.qkv.weight"].expected.names.values()) == [
        f"layers.0.{p}.weight" for p in "qkv"
    ]
    assert params["layers.0.norm.bias"].required
    assert not params["layers.0.attn.k_scale"].required
    assert engine.managed.state == "ready" and engine.managed.version == 0


def test_an_update_equals_a_fresh_engine(method, atomic):
    engine = toys.engine(method, atomic=atomic)
    before = toys.state(engine.model)
    for round_, seed in enumerate((1, 0, 2), 1):
        engine.update(toys.checkpoint(seed))
        assert toys.same_answers(engine.model, toys.fresh(method, toys.checkpoint(seed)))
        assert engine.managed.version == round_ and engine.managed.may_generate
    assert toys.same_places(before, toys.state(engine.model))


def test_all_state_equals_a_fresh_engines(method):
    engine = toys.engine(method)
    engine.update(B)
    assert toys.same_bits(toys.state(engine.model), toys.state(toys.fresh(method, B)))


def test_dummy_weights_are_followed_by_real_ones(method, atomic):
    engine = toys.engine(method, seed=None, atomic=atomic)
    for seed in (1, 2):
        weights = toys.checkpoint(seed, buffers=False)
        engine.update(weights)
        assert toys.same_answers(engine.model, toys.fresh(method, weights))


def test_an_update_of_dummy_weights_must_bring_everything():
    engine, weights = toys.engine(seed=None), toys.checkpoint(1, buffers=False)
    with pytest.raises(PatchError, match=r"layers.1.down.weight \(0 of 16 elements\)"):
        engine.update([item for item in weights if item[0] != "layers.1.down.weight"])
    engine.update(weights)
    assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


def test_a_buffer_from_the_checkpoint_is_refused_after_dummy_weights(atomic):
    """Nothing has taught that the checkpoint brings it, so it was not staged."""
    engine = toys.engine(seed=None, atomic=atomic)
    with pytest.raises(PatchError, match="straight into layers.0.norm.bias"):
        engine.update(B)
    assert engine.managed.may_generate == (atomic == "model")


@pytest.mark.parametrize("method", ["bare", "transposed", "closure"])
def test_tied_weights(method, atomic):
    a, b = toys.checkpoint(0, tied=True), toys.checkpoint(1, tied=True)
    engine = toys.Engine(toys.Model(method, tied=True), a, atomic=atomic)
    engine.update(b)
    assert engine.model.lm_head.weight is engine.model.embed.weight
    assert toys.same_answers(engine.model, toys.fresh(method, b, tied=True))


@pytest.mark.parametrize("first,then", list(itertools.product([False, True], repeat=2)))
def test_scales_that_only_some_checkpoints_have(first, then, atomic):
    engine = toys.Engine(toys.Model(), toys.checkpoint(0, scales=first), atomic=atomic)
    weights = toys.checkpoint(1, scales=then)
    if first and not then:
        with pytest.raises(PatchError, match="layers.0.attn.k_scale"):
            engine.update(weights)
    else:
        engine.update(weights)
        assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


def test_one_cut_anywhere(atomic):
    engine = toys.engine(atomic=atomic)
    for point in range(1, len(B)):
        weights = toys.checkpoint(point)
        for bucket in toys.cut(weights, point):
            engine.load(bucket)
        engine.managed.finish()
        assert toys.same_answers(engine.model, toys.fresh("transposed", weights)), point


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_cuts(seed, atomic):
    rng = random.Random(seed)
    method = rng.choice(list(toys.METHODS))
    engine = toys.engine(method, atomic=atomic)
    weights = rng.sample(B, len(B))
    points = sorted(rng.sample(range(1, len(B)), rng.randint(1, 6)))
    for bucket in toys.cut(weights, *points):
        engine.load(iter(bucket))
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh(method, B)), (method, points)


def test_a_tensor_per_call(method):
    engine = toys.engine(method)
    for item in B:
        engine.load([item])
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh(method, B))


# -- bad updates ------------------------------------------------------------------------------------------------


def broken_off(weights, index):
    yield from weights[:index]
    raise ConnectionError("the sender died")


@pytest.mark.parametrize("method", ["transposed", "handled"])
def test_failing_anywhere_leaves_the_old_policy_under_atomic_model(method):
    engine = toys.Engine(toys.Model(method), toys.checkpoint(0, scales=True), atomic="model")
    weights = toys.checkpoint(1, scales=True)
    before, answers = toys.state(engine.model), engine.model(toys.TOKENS)
    for index in range(len(weights)):
        with pytest.raises(ConnectionError) as caught:
            engine.load(broken_off(weights, index))
        assert "the old policy stays in place" in caught.value.__notes__[0]
        after = toys.state(engine.model)
        assert toys.same_places(before, after) and toys.same_bits(before, after)
        assert torch.equal(engine.model(toys.TOKENS), answers)
        assert engine.managed.may_generate and engine.managed.version == 0
    engine.update(weights)
    assert toys.same_answers(engine.model, toys.fresh(method, weights))


@pytest.mark.parametrize("method", ["transposed", "handled"])
def test_failing_anywhere_breaks_atomic_layer_until_a_complete_update(method):
    engine = toys.engine(method)
    places = toys.state(engine.model)
    for index in range(len(B)):
        with pytest.raises(ConnectionError) as caught:
            engine.load(broken_off(B, index))
        assert "generation is refused" in caught.value.__notes__[0]
        assert engine.managed.state == "broken" and not engine.managed.may_generate
        assert "the sender died" in engine.managed.policy().error
        with pytest.raises(PatchError, match="the sender died"):
            engine.managed.finish()
        assert toys.same_places(places, toys.state(engine.model))
        weights = toys.checkpoint(index + 2)
        engine.update(weights)
        assert engine.managed.may_generate
        assert toys.same_answers(engine.model, toys.fresh(method, weights))


@pytest.mark.parametrize("missing", range(len(B)))
def test_what_did_not_come_is_named(missing, atomic):
    engine = toys.engine(atomic=atomic)
    before = toys.state(engine.model)
    engine.load(B[:missing] + B[missing + 1 :])
    assert engine.managed.policy().missing == [B[missing][0]]
    with pytest.raises(PatchError, match=rf"incomplete: {B[missing][0]} did not come"):
        engine.managed.finish()
    assert engine.managed.may_generate == (atomic == "model")
    if atomic == "model":
        assert toys.same_bits(before, toys.state(engine.model))
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def change(name, to):
    return [(key, to(value) if key == name else value) for key, value in B]


@pytest.mark.parametrize(
    "to,error",
    [
        (lambda t: t[:-1], AssertionError),
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
    assert engine.managed.may_generate == (atomic == "model")
    if atomic == "model":
        assert toys.same_bits(before, toys.state(engine.model))
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_wide_floats_are_converted(dtype):
    weights = [(name, tensor.to(dtype)) for name, tensor in B]
    engine = toys.engine()
    engine.update(weights)
    assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


def test_an_unknown_name(atomic):
    engine = toys.engine(atomic=atomic)
    with pytest.raises(KeyError, match="layers.7.down.weight"):
        engine.update([*B, ("layers.7.down.weight", torch.ones(4, 4))])
    assert engine.managed.may_generate == (atomic == "model")


def test_a_tensor_twice_in_one_call_is_refused():
    engine = toys.engine()
    with pytest.raises(PatchError, match="layers.0.down.weight came twice"):
        engine.load([*B, B[4]])


def test_a_tensor_again_in_a_later_call_starts_over(atomic):
    engine = toys.engine(atomic=atomic)
    engine.load(A[: len(A) // 2])  # a sender that died without a word
    for bucket in toys.cut(B, 3, 7):
        engine.load(bucket)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


@pytest.mark.parametrize("dead", range(1, len(A)))
def test_a_dead_sender_never_mixes(dead, atomic):
    """Whatever came before it died, the next update ends whole or not at all."""
    engine = toys.engine(seed=2, atomic=atomic)
    engine.load(A[:dead])
    rng = random.Random(dead)
    try:
        for bucket in toys.cut(rng.sample(B, len(B)), 4, 9):
            engine.load(bucket)
        engine.managed.finish()
    except PatchError:
        assert engine.managed.may_generate == (atomic == "model")
        engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_begin_drops_what_came_before(atomic):
    engine = toys.engine(atomic=atomic)
    engine.load(A[:6])
    engine.managed.begin()
    engine.load(B)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_processing_that_fails(atomic):
    engine = toys.engine(atomic=atomic)
    before, good = toys.state(engine.model), engine.managed.adapter.process

    def fails(module):
        good(module)
        if module is engine.model.layers[1].down:
            raise MemoryError("no room to repack")

    engine.managed.adapter.process = fails
    with pytest.raises(MemoryError):
        engine.update(B)
    assert toys.same_places(before, toys.state(engine.model))
    assert engine.managed.may_generate == (atomic == "model")
    if atomic == "model":
        assert toys.same_bits(before, toys.state(engine.model))
    engine.managed.adapter.process = good
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_a_commit_that_fails_half_way_is_broken_whatever_the_option(atomic):
    engine = toys.engine(atomic=atomic)

    def fails(model):
        raise MemoryError("the last step failed")

    engine.managed.adapter.finalize = fails
    with pytest.raises(MemoryError) as caught:
        engine.update(B)
    assert not engine.managed.may_generate and engine.managed.state == "broken"
    assert "generation is refused" in caught.value.__notes__[0]
    engine.managed.adapter.finalize = lambda model: None
    engine.update(A)
    assert toys.same_answers(engine.model, toys.fresh("transposed", A))


def test_an_engine_that_refuses_updates_says_why(atomic):
    engine = toys.engine(atomic=atomic)
    engine.managed.adapter.refusal = lambda: "LoRA adapters are enabled"
    with pytest.raises(PatchError, match="LoRA adapters are enabled"):
        engine.load(B)
    assert engine.managed.may_generate


def test_running_requests_refuse_an_update(atomic):
    engine = toys.engine(atomic=atomic)
    engine.managed.adapter.busy = lambda: True
    with pytest.raises(PatchError, match="requests are running"):
        engine.load(B)
    assert engine.managed.may_generate


def test_a_loader_that_writes_into_the_live_model(atomic):
    engine = toys.engine("bare", atomic=atomic)
    before, live = toys.state(engine.model), engine.model.layers[0].down.weight

    def cheats(weights):
        loaded = engine.model.load_weights(weights)
        live.data.mul_(2)
        return loaded

    with pytest.raises(PatchError, match="straight into layers.0.down.weight"):
        engine.managed.load(cheats, iter(B[:2]))
    if atomic == "model":
        assert toys.same_bits(before, toys.state(engine.model))
    assert engine.managed.may_generate == (atomic == "model")


def test_a_loader_that_replaces_parameters_instead_of_writing_to_them(atomic):
    engine = toys.engine("bare", atomic=atomic)

    def by_data(weights):
        for name, tensor in weights:
            dict(engine.model.named_parameters())[name].data = tensor

    def by_parameter(weights):
        for _, tensor in weights:
            engine.model.layers[0].down.weight = torch.nn.Parameter(tensor, requires_grad=False)

    for loader in (by_data, by_parameter):
        with pytest.raises(PatchError, match=r"layers.0.down.weight .*replace"):
            engine.managed.load(loader, [("layers.0.down.weight", torch.ones(4, 4))])
        engine.update(B)
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


# -- partial updates ----------------------------------------------------------------------------------------------

FIRST = [item for item in B if item[0].startswith("layers.0.")]


@pytest.mark.parametrize("how", ["option", "finish", "load"])
def test_a_partial_update_leaves_whole_layers_out(how, atomic):
    engine = toys.engine(atomic=atomic, partial=how == "option")
    engine.load(FIRST, **({"partial": True} if how == "load" else {}))
    engine.managed.finish(**({"partial": True} if how == "finish" else {}))
    mixed = dict(A) | dict(FIRST)
    assert toys.same_answers(engine.model, toys.fresh("transposed", list(mixed.items())))
    assert engine.managed.version == 1


def test_a_partial_update_keeps_the_scales_it_does_not_bring(atomic):
    first = toys.checkpoint(0, scales=True)
    engine = toys.Engine(toys.Model(), first, atomic=atomic)
    engine.update(FIRST, partial=True)
    assert toys.same_answers(
        engine.model, toys.fresh("transposed", list((dict(first) | dict(FIRST)).items()))
    )


def test_a_partial_update_must_not_cut_a_layer(atomic):
    engine = toys.engine(atomic=atomic)
    with pytest.raises(PatchError, match=r"layers.0.v.weight did not come"):
        engine.update([item for item in FIRST if ".v." not in item[0]], partial=True)


@pytest.mark.parametrize("fault", ["failed", "abandoned", "restarted", "slept"])
def test_a_partial_update_cannot_mend_a_mixed_policy(fault):
    engine = toys.engine(partial=True)
    if fault == "failed":
        with pytest.raises(ConnectionError):
            engine.load(broken_off(B, 8))
    elif fault == "abandoned":
        engine.load(B[:8])
        engine.managed.begin()
    elif fault == "restarted":
        engine.load(B[:8])
        engine.load(B[:1])
    else:
        engine.managed.mark_discarded()
    engine.load([item for item in A if item[0].startswith("layers.1.")])
    with pytest.raises(PatchError, match="did not come"):
        engine.managed.finish()
    assert not engine.managed.may_generate
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))
    engine.update([item for item in A if item[0].startswith("layers.1.")])
    assert engine.managed.may_generate


# -- the ways an update ends --------------------------------------------------------------------------------------


def test_finish_twice_and_without_an_update(atomic):
    engine = toys.engine(atomic=atomic)
    engine.managed.finish()
    assert engine.managed.version == 0
    engine.update(B)
    engine.managed.finish()
    assert engine.managed.version == 1


def test_a_step_commits_what_is_complete_and_nothing_else(atomic):
    engine = toys.engine(atomic=atomic)
    engine.load(B[:-1])
    engine.managed.commit_if_complete()
    assert engine.managed.state == "open" and engine.managed.may_generate == (atomic == "model")
    engine.load(B[-1:])
    engine.managed.commit_if_complete()
    assert engine.managed.state == "ready" and engine.managed.version == 1
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_under_atomic_model_nothing_changes_before_the_commit(method):
    engine = toys.Engine(toys.Model(method), toys.checkpoint(0, scales=True), atomic="model")
    before, answers = toys.state(engine.model), engine.model(toys.TOKENS)
    engine.load(toys.checkpoint(1, scales=True))
    assert toys.same_bits(before, toys.state(engine.model))
    assert torch.equal(engine.model(toys.TOKENS), answers)


def test_after_sleep_level_2_only_a_complete_update_helps():
    engine = toys.engine("quantized")
    with torch.no_grad():
        for tensor in (*engine.model.parameters(), *engine.model.buffers()):
            tensor.zero_() if not tensor.is_floating_point() else tensor.fill_(torch.nan)
        for layer in engine.model.layers:
            layer.attn._scale.fill_(1)  # vLLM saves buffers over a sleep
    engine.managed.mark_discarded()
    assert not engine.managed.may_generate
    with pytest.raises(PatchError, match="sleep level 2"):
        engine.managed.finish()
    with pytest.raises(PatchError, match="did not come"):
        engine.update(B[:5])
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("quantized", B))


def test_sleep_level_2_has_nothing_to_fall_back_to():
    engine = toys.engine(atomic="model")
    engine.managed.mark_discarded()
    with pytest.raises(PatchError, match="nothing to fall back to"):
        engine.load(B)
    assert not engine.managed.may_generate


# -- threads --------------------------------------------------------------------------------------------------------


def in_the_middle(engine, weights, act):
    """Load ``weights``, and call ``act`` in another thread half-way; what it raised, or None."""
    raised = []

    def guarded():
        try:
            act()
        except Exception as error:
            raised.append(error)

    def stream():
        for index, item in enumerate(weights):
            if index == len(weights) // 2:
                other = threading.Thread(target=guarded)
                other.start()
                other.join(timeout=10)
                assert not other.is_alive()
            yield item

    engine.load(stream())
    return raised[0] if raised else None


def test_two_senders_at_once(atomic):
    engine = toys.engine(atomic=atomic)
    error = in_the_middle(engine, B, lambda: engine.load(A))
    assert isinstance(error, PatchError) and "another update" in str(error)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


@pytest.mark.parametrize("door", ["begin", "finish"])
def test_doors_are_shut_while_a_bucket_loads(door, atomic):
    engine = toys.engine(atomic=atomic, partial=True)
    error = in_the_middle(engine, B, getattr(engine.managed, door))
    assert isinstance(error, PatchError) and "another update" in str(error)
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_no_step_while_a_bucket_loads(atomic):
    engine = toys.engine(atomic=atomic, partial=True)
    allowed = []

    def step():
        engine.managed.commit_if_complete()
        allowed.append(engine.managed.may_generate)

    assert in_the_middle(engine, B, step) is None
    assert allowed == [False]
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method,atomic", [("handled", "layer"), ("quantized", "layer"), ("cached", "model"), ("closure", "model")]
)
def test_no_growth_over_many_updates(method, atomic):
    weights = [toys.checkpoint(seed, blocks=1) for seed in range(3)]
    engine = toys.Engine(toys.Model(method, blocks=1), weights[0], atomic=atomic)
    for update in range(50):
        for bucket in toys.cut(weights[update % 3], 5):
            engine.load(bucket)
        engine.managed.finish()
        if update == 3:
            count = toys.tensors()
    assert toys.tensors() <= count


def test_staged_memory_is_one_layers_at_a_time():
    engine = toys.engine("bare")
    staged = [param for layer in engine.managed.layers for param in layer.params]
    held = []

    def stream():
        for item in B:
            held.append(sum(param.storage.get().nbytes() for param in staged))
            yield item

    engine.load(stream())
    largest = max(param.storage.nbytes for param in staged)
    assert max(held) <= largest + 2 * 4 * toys.HIDDEN
    engine.managed.finish()


def test_temporaries_of_a_loader_are_not_taken_for_staged_tensors():
    """A loader's scratch tensor may get the storage identity of a staged tensor that has just been let go."""

    class Scratch(toys.Model):
        def load_weights(self, weights):
            for name, tensor in weights:
                super().load_weights([(name, tensor)])
                keep = [torch.empty(4).copy_(torch.ones(4)) for _ in range(30)]
                del keep

    engine = toys.Engine(Scratch("bare"), A)
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("bare", B))


def test_an_engine_that_is_gone_is_forgotten():
    from flashpatch.patches.fp8.refit import model_registry

    before = len(model_registry.all_models())
    model = toys.Model()
    model_registry.add(model, toys.manage(model))
    assert (
        isinstance(model_registry.get(model), ManagedModel) and len(model_registry.all_models()) == before + 1
    )
    model.load_weights(A)
    toys.process_all(model)
    model_registry.end_first_loads()
    model.load_weights(B)
    assert model_registry.get(model).state == "open"
    del model
    toys.tensors()
    assert len(model_registry.all_models()) == before


def test_an_update_that_wrote_nothing_can_be_withdrawn(atomic):
    engine = toys.engine("bare", atomic=atomic)
    engine.managed.begin()
    assert engine.managed.close_if_empty() and engine.managed.may_generate and engine.managed.version == 0
    engine.managed.begin()
    engine.load(list(B)[:1])
    assert not engine.managed.close_if_empty() and engine.managed.state == "open"
