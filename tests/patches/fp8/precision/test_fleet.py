"""Mixed fleets: what an entry may say, which replica gets which, and how a replica knows its number."""

import json
import sys
from types import SimpleNamespace

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st
from machine import limit
from vllm_lab import environment

from flashpatch import PatchError
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.precision.fleet import Entry

LAUNCHED = {"distributed_executor_backend": "external_launcher"}
TABLES = [{"precision": "bf16"}, {"precision": "fp8"}, {"precision": "fp8", "scheme": "fp8_per_block"}]


def refused(call, *args) -> str:
    with pytest.raises(PatchError) as caught:
        call(*args)
    return str(caught.value)


class TestParse:
    def test_entries(self) -> None:
        entries = fleet.parse(TABLES, "here")
        assert entries == (Entry("bf16"), Entry("fp8"), Entry("fp8", "fp8_per_block"))
        assert [entry.quantization for entry in entries] == ["", None, "fp8_per_block"]

    def test_no_entry_has_the_name_that_verl_takes_for_a_quantized_checkpoint(self) -> None:
        assert Entry("fp8", "fp8").quantization == "fp8_per_tensor"
        assert "fp8" not in fleet.DEFAULT_SCHEMES.values()

    @pytest.mark.parametrize(
        ("table", "said"),
        [
            ({}, "precision in entry 0 of here is 'missing'"),
            ({"precision": "fp9"}, "Choose from bf16, fp8"),
            ({"precision": "fp8", "shceme": "x"}, "unknown key 'shceme' in entry 0 of here"),
            ({"precision": 8}, "Give a string"),
            ({"precision": "fp8", "scheme": "fp8_per_chanel"}, "Did you mean 'fp8_per_channel'? Known: fp8,"),
            ({"precision": "bf16", "scheme": "fp8"}, "bf16 and int8 take none"),
        ],
    )
    def test_refusals(self, table, said: str) -> None:
        assert said in refused(fleet.parse, [table], "here")

    def test_too_many(self) -> None:
        assert "at most" in refused(fleet.parse, [{"precision": "fp8"}] * 1025, "here")


@given(st.integers(1, 20), st.integers(0, 1000))
def test_entries_take_turns(count: int, rank: int) -> None:
    entries = tuple(Entry("fp8", f"scheme{n}") for n in range(count))
    ranks = range(rank, rank + count)
    assert {fleet.assigned(entries, r) for r in ranks} == set(entries), (
        "any run of replicas has every entry once"
    )
    assert fleet.assigned(entries, rank) is fleet.assigned(entries, rank + count)


class TestPlace:
    @staticmethod
    def args(**given):
        sizes = dict(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
        defaults = dict(distributed_executor_backend=None, data_parallel_rank=None, **sizes)
        return SimpleNamespace(**{**defaults, **given})

    @pytest.mark.parametrize(
        ("given", "environ", "rank"),
        [
            ({}, {}, 0),
            ({}, {"VERL_REPLICA_RANK": "3"}, 3),
            ({"data_parallel_size": 4}, {"VERL_REPLICA_RANK": "3"}, 3),
            ({"data_parallel_rank": 2, "data_parallel_size": 4}, {}, 2),
            (LAUNCHED, {"RANK": "5"}, 5),
            (LAUNCHED | {"tensor_parallel_size": 2}, {"RANK": "4"}, 2),
            (LAUNCHED | {"tensor_parallel_size": 2}, {"RANK": "5"}, 2),
            (LAUNCHED | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"RANK": "7"}, 1),
            ({}, {"RANK": "5"}, 0),
        ],
    )
    def test_rank(self, given, environ, rank: int) -> None:
        assert fleet.place(self.args(**given), environ).rank == rank

    @pytest.mark.parametrize(
        ("given", "environ", "said"),
        [
            ({"data_parallel_size": 2}, {}, "2 data-parallel ranks"),
            ({}, {"VERL_REPLICA_RANK": "-1"}, "VERL_REPLICA_RANK is '-1'"),
            ({}, {"VERL_REPLICA_RANK": "٣"}, "the rank of this replica is unknown"),
            (LAUNCHED, {}, "RANK is ''"),
        ],
    )
    def test_refusals(self, given, environ, said: str) -> None:
        assert said in refused(fleet.place, self.args(**given), environ)


class TestEntries:
    """What the options ask for, and FlashRL's variables, which nothing reads."""

    def test_a_precision_with_its_scheme_and_tables_in_place_of_both(self) -> None:
        assert fleet.entries("fp8", "", ()) == (Entry("fp8"),)
        assert fleet.entries("bf16", "ignored", ()) == (Entry("bf16"),)
        assert fleet.entries("fp8", "fp8_per_tensor", ()) == (Entry("fp8", "fp8_per_tensor"),)
        assert fleet.entries("fp8", "", TABLES[:2]) == (Entry("bf16"), Entry("fp8"))

    def test_a_variable_of_flashrl_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FLASHRL_CONFIG", "int8")
        message = refused(fleet.entries, "fp8", "", ())
        assert "FLASHRL_CONFIG is set" in message and "docs/reference/forks.md" in message
        monkeypatch.setenv("FLASHRL_CONFIG", "")
        assert fleet.entries("fp8", "", ()) == (Entry("fp8"),)


CONFIGURE = """
import json, os, sys
import flashpatch
from flashpatch import PatchError, ledger
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
# Stock vLLM inspects each architecture in a process that imports it all again.
registry._run_in_subprocess = lambda function: function()
def configured(model, options, arguments, environ):
    os.environ.update(environ)
    flashpatch.enable("fp8", **options)
    try:
        args = EngineArgs(model=model, dtype="bfloat16", max_model_len=64, **arguments)
        config = args.create_engine_config()
        args.create_engine_config()  # a second one of the same arguments is no contradiction
    except PatchError as error:
        return {"error": str(error)}
    finally:
        flashpatch.disable("fp8")
        for name in environ:
            del os.environ[name]
    ledger.flush()
    rows = [json.load(open(os.path.join(at, f))) for at, _, fs in os.walk(os.environ["FLASHPATCH_LEDGER"])
            for f in fs if f.endswith(".json")]
    [notes] = [row["notes"] for row in rows if row.get("pid") == os.getpid()]
    return {"quantization": config.model_config.quantization, "notes": notes}
model, scenarios = json.loads(sys.argv[1])
print(json.dumps({name: configured(model, *how) for name, how in scenarios.items()}))
"""
FLEET = [{"precision": "bf16"}, {"precision": "fp8_channel"}, {"precision": "fp8_tensor"}]
EIGHT_BITS = [{"precision": "int8"}, {"precision": "int8_weight_only"}]


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> dict[str, dict]:
    """The quantization that engines' configurations get, and what their process notes in the ledger: all in one
    process, which takes long enough to start."""
    pytest.importorskip("vllm")
    from flashpatch.verify.probes.fp8 import tiny

    home = tmp_path_factory.mktemp("fleet")
    model = tiny.write(home / "m", 0)
    fleet, eight = dict(fleet=FLEET), dict(fleet=EIGHT_BITS)
    ranks = {f"rank {n}": (fleet, {}, {"VERL_REPLICA_RANK": str(n)}) for n in (0, 1, 5)}
    scenarios = {
        **ranks,
        "caller": (fleet, {"quantization": "fp8_per_tensor"}, {"VERL_REPLICA_RANK": "1"}),
        "eight 0": (eight, {}, {"VERL_REPLICA_RANK": "0"}),
        "eight 1": (eight, {}, {"VERL_REPLICA_RANK": "1"}),
        "one": (dict(fleet=[{"precision": "fp8_tensor"}]), {}, {}),
        "none": ({}, {}, {}),
        "scheme": (dict(scheme="fp8_per_tensor"), {}, {}),
        "explicit": ({}, {"quantization": "fp8_per_tensor"}, {}),
        "excluded": (dict(exclude_models=["*/m*"]), {}, {}),
        "layer": (dict(exclude_models=["model.layers.0*"]), {}, {}),
    }
    environ = environment.clean(FLASHPATCH_LEDGER=str(home / "ledger"))
    asked = json.dumps([str(model), scenarios])
    done = warm.run(warm.VLLM, ["-c", CONFIGURE, asked], env=environ, cwd=home, timeout=limit(600))
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}


@pytest.mark.vllm
class TestEngines:
    def test_it_is_said_that_a_model_is_quantized_and_a_pattern_for_no_model(self, configured) -> None:
        lines = [line for line in configured["log"].splitlines() if "quantizes" in line]
        assert len(lines) == 8, "neither what keeps its precision nor what the caller quantizes"
        assert sum("/m to fp8 as it is loaded; the option exclude_models" in line for line in lines) == 2
        assert "none of exclude_models=['model.layers.0*'] matches this path" in lines[-1]

    @pytest.mark.parametrize(
        ("rank", "quantization", "precision"),
        [(0, None, "bf16"), (1, "fp8_per_channel", "fp8_channel"), (5, "fp8_per_tensor", "fp8_tensor")],
    )
    def test_a_replica_gets_its_entry_and_the_ledger_says_so(self, rank, quantization, precision, configured):
        found = configured[f"rank {rank}"]
        assert found["quantization"] == quantization
        assert found["notes"]["precision"] == precision
        assert found["notes"]["fleet"] == {
            "replica": rank,
            "known_by": "VERL_REPLICA_RANK",
            "entry": rank % 3,
            "entries": ["bf16", "fp8_channel", "fp8_tensor"],
        }

    def test_a_caller_who_wants_something_else_is_told(self, configured) -> None:
        said = configured["caller"]["error"]
        assert "is to run in fp8_channel, and its quantization is fp8_per_tensor" in said

    def test_int8_is_written_over_the_models_config(self, configured) -> None:
        assert configured["eight 0"]["quantization"] == "compressed-tensors"
        assert configured["eight 0"]["notes"]["precision"] == "int8"
        assert configured["eight 1"]["quantization"] == "torchao"
        assert configured["eight 1"]["notes"]["logprobs"] == "processed_logprobs"

    @pytest.mark.parametrize(
        ("how", "quantization"),
        [
            ("one", "fp8_per_tensor"),
            ("none", "fp8_per_channel"),
            ("scheme", "fp8_per_tensor"),
            ("explicit", "fp8_per_tensor"),
            ("excluded", None),
        ],
    )
    def test_who_gets_which_precision_without_a_fleet(self, how: str, quantization, configured) -> None:
        assert configured[how]["quantization"] == quantization


@pytest.mark.parametrize(
    ("platform", "scheme"),
    [("cpu", "fp8_per_channel"), ("cuda", "fp8_per_tensor"), ("rocm", "fp8_per_tensor")],
)
def test_the_scheme_of_each_platform(platform: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(is_cpu=lambda: platform == "cpu", is_rocm=lambda: platform == "rocm")
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=current))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=sys.modules["vllm.platforms"]))
    assert fleet.default_scheme() == scheme
