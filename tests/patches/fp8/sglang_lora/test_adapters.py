"""LoRA adapters of a running SGLang engine: replaced exactly over any base, or refused by name with the old one in place."""

import json
from pathlib import Path
from typing import Any

import lora_lab
import pytest
import sglang_lab as lab
from vllm_lab import environment

pytestmark = pytest.mark.sglang

LORA = dict(
    enable_lora=True,
    max_lora_rank=8,
    lora_target_modules=list(lora_lab.TARGETS),
    max_loras_per_batch=3,
    lora_backend="torch_native",
)
AMX = {"STANDIN_AMX": "1"}
DOWN = "base_model.model.model.layers.1.mlp.down_proj"


def checkpoint(seed: int = 0) -> str:
    return lab.checkpoint(environment.store(), "qwen2", seed)


def adapters(*seeds: int) -> list[str]:
    return [lora_lab.adapter(checkpoint(), seed) for seed in seeds]


def load(folder: str, **how: Any) -> list[Any]:
    return ["lora.load", dict(folder=folder, **how)]


def fresh(folder: str, *steps: Any, **engine: Any) -> dict[str, Any]:
    """A job of an engine that has had this adapter alone; without FlashPatch unless it is named."""
    return {**LORA, "model": checkpoint(), "steps": [load(folder), *(steps or ("lora.under",))], **engine}


def taken(steps: list[Any], *numbers: int) -> None:
    for number in numbers:
        assert steps[number][0] is True, (number, steps[number])


@pytest.mark.parametrize(
    "name",
    ["bf16", pytest.param("int8", marks=pytest.mark.full), pytest.param("fp8", marks=pytest.mark.full)],
)
def test_each_adapter_is_a_fresh_engines_and_the_base_stays_as_it_was(name: str, tmp_path: Path) -> None:
    """Three ways of sending, under one name; the fresh engines over bf16 are stock."""
    one, two = adapters(1, 2)
    steps = [
        "answers",  # 0
        load(one, sync="s1"),
        "lora.under",  # 2
        load(two, how="path"),
        "lora.under",  # 4
        load(one, how="flattened", sync="s2"),
        "lora.under",  # 6
        "answers",
    ]
    more = dict(env=AMX) if name == "bf16" else dict(flashpatch=name, env=AMX)
    seen, *others = lab.together(
        tmp_path,
        dict(
            model=checkpoint(),
            steps=steps,
            flashpatch=name,
            env=AMX,
            options={"fp8": dict(verify_commit=True)},
            **LORA,
        ),
        *(fresh(folder, **more) for folder in (one, two)),
    )
    assert seen.done and all(other.done for other in others), str(seen)
    got, (first, second) = seen.steps, (other.steps[1] for other in others)
    taken(got, 1, 3, 5)
    assert first != second and first not in (got[0], second)
    assert (got[2], got[4], got[6]) == (first, second, first)
    assert got[7] == got[0]
    receipts = [json.loads(got[number][1].partition(": ")[2])[0] for number in (1, 5)]
    assert [one["id"] for one in receipts] == ["s1", "s2"] and all(one["adapter"] for one in receipts)
    assert receipts[0]["adapters"] == receipts[1]["adapters"] and set(receipts[0]["adapters"]) == {"policy"}
    assert receipts[0]["checksums"] == receipts[1]["checksums"] != []  # the base's bytes


@pytest.mark.parametrize(
    "name",
    ["bf16", pytest.param("int8", marks=pytest.mark.full), pytest.param("fp8", marks=pytest.mark.full)],
)
def test_the_base_is_updated_beside_adapters(name: str, tmp_path: Path) -> None:
    (one, two), other = adapters(1, 2), checkpoint(1)
    steps = [
        load(one),
        "lora.under",  # 1
        ["update", dict(source=other, how="split")],
        "answers",  # 3
        "lora.under",
        load(two),
        "lora.under",  # 6
        ["update", dict(source=checkpoint(), how="single")],
        "lora.under",  # 8
    ]
    more = dict(env=AMX) if name == "bf16" else dict(flashpatch=name, env=AMX)
    seen, first, second, before = lab.together(
        tmp_path,
        dict(model=checkpoint(), steps=steps, flashpatch=name, env=AMX, **LORA),
        fresh(one, "lora.under", "answers", model=other, **more),
        fresh(two, model=other, **more),
        fresh(two, **more),
    )
    assert seen.done and first.done and second.done and before.done, str(seen)
    got = seen.steps
    for number in (2, 7):
        assert all(done for done, _ in got[number]), got[number]
    assert got[4] == first.steps[1] != got[1] and got[3] == first.steps[2]
    assert got[6] == second.steps[1] and got[8] == before.steps[1]


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nan": (dict(value=float("nan")), {}, "NaN or infinity"),
    "unknown module": (
        dict(module=DOWN.replace("down", "side")),
        {},
        "no place for model.layers.1.mlp.side_proj",
    ),
    "large rank": ({}, dict(r=16), "max-lora-rank"),
}
"""What is sent, as `spoiled` takes it, with which configuration, and what the refusal says."""


def spoiled(value: float = 1.0, module: str = DOWN) -> lora_lab.Tensors:
    """Return an adapter of which one module's part holds a value, or has another name."""
    found = lora_lab.tensors(checkpoint(), 3)
    for side in "AB":
        tensor = found.pop(f"{DOWN}.lora_{side}.weight").clone()
        tensor[0, 0] = value
        found[f"{module}.lora_{side}.weight"] = tensor
    return found


def test_what_is_wrong_is_refused_by_name_and_the_old_one_stays(tmp_path: Path) -> None:
    (good,) = adapters(1)
    bad = [lora_lab.write(tmp_path / it, spoiled(**how), **config) for it, (how, config, _) in BAD.items()]
    steps = [load(good), "lora.under"]
    for folder in bad:
        steps += [load(folder), "lora.under"]
    seen = lab.run(tmp_path / "run", model=checkpoint(), steps=steps, flashpatch="bf16", **LORA)
    assert seen.done, str(seen)
    taken(seen.steps, 0)
    for at, (name, (_, _, says)) in enumerate(BAD.items(), 1):
        done, message = seen.steps[2 * at]
        assert not done and says in message, (name, done, message)
        assert "fp8.sglang_lora.load_lora_adapter_from_tensors" in message, name
        assert seen.steps[2 * at + 1] == seen.steps[1], name


@pytest.mark.full
def test_a_file_that_changes_before_the_first_request(tmp_path: Path) -> None:
    """Stock has read a part of the tensors by then, and answers by a mixture of two adapters."""
    one, two = adapters(1, 2)
    found = lora_lab.tensors(checkpoint(), 1)

    def job(name: str, **more: Any) -> dict[str, Any]:
        folder = lora_lab.write(tmp_path / name, found)
        steps = [load(folder, how="path"), ["lora.overwrite", dict(folder=folder, source=two)], "lora.under"]
        return dict(model=checkpoint(), steps=steps, **LORA, **more)

    ours, stock, *plain = lab.together(
        tmp_path / "run", job("ours", flashpatch="bf16"), job("stock"), fresh(one), fresh(two)
    )
    assert ours.done and stock.done, str(ours)
    first, second = (one.steps[1] for one in plain)
    assert ours.steps[2] == first
    assert stock.steps[2] not in (first, second)


def test_requests_under_an_adapter_that_is_replaced(tmp_path: Path) -> None:
    """By default it is not; under keep they end under the one they began with, and it is unloaded then."""
    one, two = adapters(1, 2)
    steps = [load(one), ["lora.across", dict(folder=two)], "lora.under", "lora.greedy"]
    refusing, keeping, first, second = lab.together(
        tmp_path,
        dict(model=checkpoint(), steps=steps, flashpatch="bf16", **LORA),
        dict(
            model=checkpoint(),
            steps=steps,
            flashpatch="bf16",
            options={"fp8": dict(in_flight="keep")},
            **LORA,
        ),
        fresh(one, "lora.under", "lora.greedy"),
        fresh(two, "lora.under", "lora.greedy"),
    )
    for seen in (refusing, keeping, first, second):
        assert seen.done, str(seen)
    done, message = refusing.steps[1]["answer"]
    assert not done and "under the LoRA adapter 'policy' (1)" in message and "in_flight=keep" in message
    assert refusing.steps[1]["ids"] == refusing.steps[3] == first.steps[2] != second.steps[2]
    assert refusing.steps[2] == first.steps[1]
    met = keeping.steps[1]
    assert met["answer"][0] is True and met["during"] < len(met["ids"]), met
    assert met["ids"] == first.steps[2] and keeping.steps[3] == second.steps[2]
    assert keeping.steps[2] == second.steps[1]
    assert "LoRA adapter unloading completes" in keeping.log or lab.OLD


@pytest.mark.full
def test_a_hundred_versions_in_two_places_of_which_each_answers_its_own_requests(tmp_path: Path) -> None:
    folders, versions = adapters(1, 2, 3), 100
    two_places = {**LORA, "max_loras_per_batch": 2}
    keep = {"fp8": dict(in_flight="keep")}
    steps = [["lora.many", dict(folders=folders, versions=versions)]]
    seen, *plain = lab.together(
        tmp_path,
        dict(model=checkpoint(), steps=steps, flashpatch="bf16", options=keep, **two_places),
        *(fresh(folder, ["lora.greedy", dict(count=12)]) for folder in folders),
    )
    assert seen.done and all(one.done for one in plain), str(seen)
    want, [got] = [one.steps[1] for one in plain], seen.steps
    assert len({tuple(ids) for ids in want}) == 3  # else a wrong version would not be seen
    assert not [version for version in range(versions) if got["ids"][version] != want[version % 3]]
    assert got["met"] > versions / 2  # else nothing was in flight


@pytest.mark.sglang(least="0.5.21")  # on 0.5.12 two ranks were not seen to come to an end
@pytest.mark.parametrize("amx", ["0", pytest.param("1", marks=pytest.mark.full)], ids=["plain", "amx"])
def test_ranks_take_an_adapter_together_or_not_at_all(amx: str, tmp_path: Path) -> None:
    """Stock asks the first rank alone: it takes the adapter, and ends at the first request that needs it.

    With AMX SGLang sums over ranks in shared memory, by an operator of its own."""
    one, two = adapters(1, 2)
    tp2, bound = dict(LORA, tp_size=2), {"SGLANG_CPU_OMP_THREADS_BIND": "0|0", "STANDIN_AMX": amx}

    def job(name: str, flashpatch: str = "") -> dict[str, Any]:
        file = str(tmp_path / name)
        first, then = (load(folder, how="path") for folder in (one, two))
        steps = [first, "lora.under", ["lora.fault", dict(file=file)]]
        if flashpatch:
            steps += [then, "lora.under", then, "lora.under"]
        else:
            steps += [load(two, name="other", how="path"), ["lora.under", dict(name="other")]]
        return dict(
            model=checkpoint(),
            steps=steps,
            flashpatch=flashpatch,
            env={"JOB_LORA_FAULT": file, **bound},
            **tp2,
        )

    ours, stock, second = lab.together(
        tmp_path / "run",
        job("a", "bf16"),
        job("b"),
        {**fresh(two, env=bound, **tp2), "steps": [load(two, how="path"), "lora.under"]},
    )
    assert ours.done and second.done, str(ours)
    taken(ours.steps, 0, 5)
    done, message = ours.steps[3]
    assert not done and "rank 1 lost it" in message, message
    assert ours.steps[4] == ours.steps[1] != ours.steps[6] == second.steps[1]
    assert stock.steps[3][0] is True and not stock.done and "rank 1" not in str(stock.steps[3]), str(stock)
