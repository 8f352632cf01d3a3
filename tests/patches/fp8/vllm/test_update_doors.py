"""Every door leads to the same update: naive loads, verl's pattern, vLLM's reload and its transfer session.

And the other door: engines opened without a quantization get the family's precision, whoever opens them."""

import itertools
from typing import Any

import pytest
import update_doors
import vllm_updates as updates
from vllm_lab import engines, oracle, scenario

pytestmark = pytest.mark.vllm

FP8 = "fp8_per_channel"


# --- what runs in the engine's process


def _by_path(llm: Any, path: str) -> None:
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=path))


DOORS = {**update_doors.DOORS, "reload by path": _by_path}


def doors(a: str, b: str, kw: dict[str, Any]) -> dict[str, Any]:
    """B and A in turn, through each door."""
    updates.register_backend()
    found: dict[str, Any] = {}
    with engines.open_llm(a, weight_transfer_config=dict(backend="ipc"), **kw) as llm:
        llm.init_weight_transfer_engine({"init_info": {}})
        before = engines.addresses(engines.inner_model(llm))
        for (name, through), path in zip(DOORS.items(), itertools.cycle((b, a))):
            through(llm, path)
            found[name] = dict(path=path, answers=engines.answers(llm))
        found["moved"] = before != engines.addresses(engines.inner_model(llm))
        llm.start_weight_update()
        llm.update_weights({"update_info": dict(path=a, part=0, parts=2)})
        found["unfinished"] = updates.error(llm.finish_weight_update)
        found["refusal"] = updates.refusal(llm)
        llm.collective_rpc("reload_weights")  # from the last path given, as stock vLLM does
        found["by itself"] = engines.answers(llm)
    return found


def unquantized(model: str, scheme: str) -> str | None:
    def opened() -> None:
        with engines.open_llm(model, quantization=scheme):
            pass

    return updates.error(opened)


def switched_off(a: str) -> dict[str, Any]:
    """Whether an open engine's model has a loader of its own, before and after; and what it answers then."""
    import flashpatch

    flashpatch.enable("bf16")
    with engines.open_llm(a) as llm:
        model = engines.inner_model(llm)
        own = "load_weights" in vars(model)
        flashpatch.disable("bf16")
        return dict(shadowed=[own, "load_weights" in vars(model)], answers=engines.answers(llm))


# --- the tests


@pytest.mark.parametrize("quantization", [None, pytest.param(FP8, marks=pytest.mark.full)])
def test_every_door_leads_to_the_same_answers(
    bf16: scenario.Runner, ab: tuple[str, str], quantization: str | None
) -> None:
    kw = dict(quantization=quantization)
    got = bf16(doors, *ab, kw)
    for door in DOORS:
        want = oracle.answers(got[door]["path"], **kw)
        assert engines.difference(got[door]["answers"], want).exact, door
    assert not got["moved"]
    assert "did not come" in got["unfinished"] and got["refusal"] is not None
    last = got["reload by path"]["path"]
    assert engines.difference(got["by itself"], oracle.answers(last, **kw)).exact


NVFP4 = pytest.param("nvfp4_per_token", marks=pytest.mark.vllm(least="0.27"))


@pytest.mark.parametrize("scheme", ["int8_per_channel_weight_only", NVFP4])
def test_a_scheme_that_quantizes_nothing_is_refused(bf16: scenario.Runner, ab: tuple[str, str], scheme: str):
    error = bf16(unquantized, ab[0], scheme)
    assert error is not None and "PatchError" in error and scheme in error and "unquantized" in error


def test_an_engine_that_is_open_outlives_disable(runner: scenario.Runner, ab: tuple[str, str]) -> None:
    got = runner(switched_off, ab[0])
    assert got["shadowed"] == [True, False]
    assert engines.difference(got["answers"], oracle.answers(ab[0])).exact
