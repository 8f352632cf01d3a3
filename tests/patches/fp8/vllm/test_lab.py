"""The laboratory's own promises: failures told in full, answers told apart, int4 packed as others read it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
from vllm_lab import engines, environment, models, oracle, quantized, scenario

pytestmark = pytest.mark.vllm


def fail() -> None:
    print("a line of its log")
    raise ValueError("on purpose")


def sleep() -> None:
    time.sleep(600)


def die() -> None:
    print("last words", flush=True)
    os._exit(3)


def surroundings(**kw: Any) -> dict[str, Any]:
    return dict(kw, pid=os.getpid(), path=sys.path, flashpatch=os.environ.get("FLASHPATCH"))


def test_a_failure_tells_all() -> None:
    with scenario.Runner() as runner:
        with pytest.raises(scenario.ScenarioError, match="(?s)ValueError: on purpose.*a line of its log"):
            runner(fail)
        first = runner(surroundings)["pid"]  # it survives an exception
        with pytest.raises(scenario.ScenarioError, match="(?s)status 3.*last words"):
            runner(die)
        assert runner(surroundings)["pid"] != first


def test_a_hang_shows_where() -> None:
    with pytest.raises(scenario.ScenarioError, match="(?s)no result in time.*in sleep"):
        scenario.run(sleep, timeout=14)


def test_the_environment_is_clean_but_for_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPATCH", "fp8")
    with scenario.Runner() as runner:
        assert runner(surroundings, x=1)["flashpatch"] is None
    assert scenario.run(surroundings, env={"FLASHPATCH": "bf16"})["flashpatch"] == "bf16"


def test_checkpoints_repeat_and_differ_by_seed() -> None:
    import torch

    def of(seed: int, where: str) -> dict[str, Any]:
        return dict(models.weights(models.checkpoint(environment.store() / where, "qwen2", seed)))

    a, again, b = of(0, "models"), of(0, "again"), of(1, "models")
    assert a.keys() == b.keys() and all(torch.equal(a[name], again[name]) for name in a)
    assert not any(torch.equal(a[name], b[name]) for name in a)


def test_packed_int4_is_what_compressed_tensors_unpacks() -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    model = models.checkpoint(environment.store() / "models", "qwen2")
    name = "model.layers.0.mlp.down_proj.weight"
    weight, packed = (
        dict(models.weights(model))[name].float(),
        dict(quantized.quantized_weights(model, "w4a16")),
    )
    scale = packed[name + "_scale"].float().repeat_interleave(quantized.GROUP, 1)
    back = unpack_from_int32(packed[name + "_packed"], 4, torch.Size(packed[name + "_shape"])).float() * scale
    assert ((back - weight).abs() <= scale * 0.51).all()


@pytest.mark.full
def test_answers_repeat_and_differences_are_counted() -> None:
    model = models.checkpoint(environment.store() / "models", "qwen2")
    a, b = oracle.answers(model), oracle.answers(model, env={"NOT": "cached"})
    assert engines.difference(a, b).exact
    values = engines.array(a["logprobs"]).copy()
    values[0, :3] = float("nan")
    values[1, 7] += 0.5
    c = dict(a, logprobs=engines._text([values]), tokens=[[-1, *a["tokens"][0][1:]], *a["tokens"][1:]])
    gap = engines.difference(a, c)
    assert gap.largest == pytest.approx(0.5, abs=1e-5)
    assert (gap.nan, gap.tokens, gap.exact) == (3, 1, False)
