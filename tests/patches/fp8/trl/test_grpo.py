"""TRL's GRPO with a colocated engine: after the last sync it answers as a fresh one on the trainer's weights."""

from pathlib import Path
from typing import Any

import pytest
import run_events
import trl_job
import vllm_updates as updates
from trainer_senders import PLUGINS
from vllm_lab import engines, oracle, quantized, scenario

pytestmark = [pytest.mark.trainer("trl"), pytest.mark.full]

#: One GiB for the KV cache: TRL asks for a share of the machine.
ENV = {**PLUGINS, "VLLM_CPU_KVCACHE_SPACE": "1"}
MODELS = {"bf16": "qwen2-tied", "int8": "qwen2", "fp8": "qwen2"}


def fresh(precision: str, weights: Path) -> dict[str, Any]:
    """What a stock engine answers that was opened on the trainer's weights."""
    if precision == "int8":
        return oracle.answers(quantized.quantize(weights, "int8"), dtype="bfloat16")
    scheme = dict(quantization="fp8_per_channel") if precision == "fp8" else {}
    return oracle.answers(weights, dtype="bfloat16", **scheme)


@pytest.mark.parametrize("precision", MODELS)
def test_the_engine_is_a_fresh_one_after_the_last_sync(precision: str, tmp_path: Path) -> None:
    model = updates.checkpoint(MODELS[precision], 0)
    env = {"FLASHPATCH": precision, "FLASHPATCH_LEDGER": str(tmp_path / "ledger"), "FLASHPATCH_RUN": "r"}
    found = scenario.run(trl_job.train, model, str(tmp_path / "job"), env={**ENV, **env})
    assert found["error"] is None, found["error"]
    want = fresh(precision, tmp_path / "job" / "final")
    assert engines.difference(found["answers"], want).exact
    before = fresh(precision, Path(model))
    assert engines.difference(found["answers"], before).mean > 0.05, "nothing was trained"
    check_metrics(found, precision)
    check_ledger(tmp_path / "ledger" / "r")


def check_metrics(found: dict[str, Any], precision: str) -> None:
    """The tracker and the history have each step's numbers; what Transformers logs at the end has the engine's too."""
    tracked = {name.removeprefix("train/"): values for name, values in found["tracked"].items()}
    assert tracked["sync/policy_version"] == [1, 2, 3, 3]
    assert tracked["sync/updates_refused"] == tracked["sync/requests_refused"] == [0, 0, 0, 0]
    assert all(seconds > 0 for seconds in tracked["timing_s/sync/total"])
    assert tracked["mismatch/tokens"] == [32, 32, 32]
    gaps = tracked["mismatch/k3"]
    assert len(gaps) == 3 and all(0 < gap < 0.1 for gap in gaps)
    # TRL's own mean difference, of the same tokens: the square of a typical one is twice k3.
    for gap, difference in zip(gaps, tracked["sampling/sampling_logp_difference/mean"], strict=True):
        assert 0.2 < 2 * gap / difference**2 < 10
    for name, value in zip(
        tracked["mismatch/weight_mean"], tracked["sampling/importance_sampling_ratio/mean"]
    ):
        assert name == pytest.approx(value, abs=1e-5)
    logged = [row for row in found["history"] if "loss" in row]
    assert [row["mismatch/k3"] for row in logged] == pytest.approx(gaps, rel=1e-5)
    if precision != "bf16":
        assert sum(gaps) / 3 > 5e-4


def check_ledger(run: Path) -> None:
    """A report of the job finds the syncs, and what was logged."""
    events = [event for process in run_events.read(run)[0] for event in process.events]
    syncs = [event for event in events if event["event"] == "sync"]
    assert [event.get("step") for event in syncs] == [0, 1, 2, None]
    assert [event["sync/policy_version"] for event in syncs] == [1, 2, 3, 4]
    metrics = [event for event in events if event["event"] == "metrics" and "mismatch/k3" in event["values"]]
    assert [event["step"] for event in metrics] == [1, 2, 3]
    assert {"reward", "loss", "sync/policy_version"} <= metrics[0]["values"].keys()


def test_a_parameter_that_is_not_sent_is_named_at_the_sync(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    model = updates.checkpoint("qwen2", 0)
    found = scenario.run(
        trl_job.without_a_parameter, model, str(tmp_path), name, env={**ENV, "FLASHPATCH": "bf16"}
    )
    assert found["step"] == 0
    last = found["error"].strip().splitlines()[-1]
    assert "fp8.trl.sync_weights" in last and name.removesuffix(".weight") in last, found["error"]


def test_the_sync_after_one_that_failed_is_taken(tmp_path: Path) -> None:
    name, model = "model.layers.1.mlp.down_proj.weight", updates.checkpoint("qwen2", 0)
    env = {**ENV, "FLASHPATCH": "bf16"}
    found = scenario.run(trl_job.failing_syncs, model, str(tmp_path), name, env=env)
    named = dict(nan="NaN", missing=name.removesuffix(".weight"), dies="broke off")
    for fault, (error, refusal, again, answers) in found.items():
        assert named[fault] in error and "PatchError" in refusal, fault
        assert again is None and engines.difference(answers, fresh("bf16", Path(model))).exact, fault


def undone() -> dict[str, bool]:
    """Whether TRL's functions are replaced, and are the originals afterwards."""
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer.grpo_trainer import GRPOTrainer

    import flashpatch

    def now() -> list[Any]:
        return [VLLMGeneration.sync_weights, GRPOTrainer._generate_and_score_completions]

    before = now()
    flashpatch.enable("int8")
    during = now()
    flashpatch.disable("int8")
    return dict(
        replaced=all(a is not b for a, b in zip(before, during, strict=True)),
        restored=all(a is b for a, b in zip(before, now(), strict=True)),
    )


def test_all_is_undone_without_a_trace() -> None:
    assert scenario.run(undone) == dict(replaced=True, restored=True)
