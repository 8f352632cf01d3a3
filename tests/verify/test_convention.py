"""How a family's probe is found, that a proof which it does not give is missed, and by which name a family is reported."""

import json
import subprocess
import sys

import probe_proofs
import pytest

from flashpatch import registry
from flashpatch.record import Family
from flashpatch.verify.probes.cpu import probe as cpu
from flashpatch.verify.probes.flowrl import probe as flowrl
from flashpatch.verify.probes.grpo import probe as grpo
from flashpatch.verify.proof import Proof
from flashpatch.verify.run import find_probe


@pytest.mark.parametrize("family", registry.built_in())
def test_a_built_in_family_has_its_probe_by_convention(family):
    assert registry.families()[family].probe is None
    found = find_probe(registry.families()[family])
    assert (found.__module__, found.__name__) == (f"flashpatch.verify.probes.{family}.probe", "probe")


def test_a_family_of_another_package_brings_its_own():
    def probe(nonce, workdir):
        return [Proof("other", "", True, "")]

    assert find_probe(Family("other", "", (), probe=probe)) is probe
    assert find_probe(Family("other", "", ())) is None


def test_patches_do_not_import_verify_and_probes_load_lazily():
    code = (
        "import sys; from flashpatch import registry; registry.families();assert not [name for name in sys.modules if "
        "name.startswith('flashpatch.verify')];from flashpatch.verify.run import find_probe;[find_probe(family) for family in "
        "registry.families().values()];print([n for n in sys.modules if n in ('numpy', 'sglang', 'torch', 'transformers', "
        "'verl', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture
def loud(site):
    """The family toy is switched on as ``loud`` or ``quiet``."""
    source = (site / "toyfamily.py").read_text()
    source = source.replace("), probe=probe)", '), probe=probe, names={"loud": {}, "quiet": {}})')
    (site / "toyfamily.py").write_text(source)


def test_a_family_is_reported_by_the_name_the_user_typed(verify, loud):
    done = verify("loud", "--json")
    [family] = json.loads(done.stdout)["families"]
    assert {proof["subject"] for proof in family["proofs"]} == {"loud"}
    assert (family["name"], family["family"]) == ("loud", "toy")
    words = (verify("loud").stdout + done.stderr).replace("toy.toyfw.", "").replace("toyfw 1.0", "").split()
    assert "loud" in words and "loud:" in words and not [word for word in words if "toy" in word]


def test_a_problem_calls_the_family_by_the_name_the_user_typed(verify, loud):
    job = "import os; [os.environ.pop(n) for n in list(os.environ) if n.startswith('FLASHPATCH')]; print(41)"
    job = f"import sys, subprocess; sys.exit(subprocess.call([sys.executable, '-c', {job!r}]))"
    done = verify("loud", "--json", TOY_JOB=job)
    assert done.returncode == 1
    [family] = json.loads(done.stdout)["families"]
    assert {proof["subject"] for proof in family["proofs"]} == {"loud"}


def test_live_reports_a_required_family_by_the_name_the_user_typed(run, verify, loud):
    run("-c", "import flashpatch.ledger as l; l.role('worker')", FLASHPATCH="fp8")
    done = verify("loud", "--live")
    assert done.returncode == 1
    assert "no process carries loud" in done.stdout and "toy" not in done.stdout


@pytest.mark.parametrize("module", [cpu, flowrl, grpo], ids=["cpu", "flowrl", "grpo"])
def test_a_proof_that_is_missing_is_found(module):
    given = [
        {"what": one.pattern.replace("\\", "").replace(".+", "fsdp2").removeprefix("(?:").partition("|")[0]}
        for one in probe_proofs.patterns(module)
    ]
    assert len(given) >= 3
    assert not probe_proofs.missing(module, given)
    whole = [one for one in given if one["what"] != "fsdp2"]
    assert probe_proofs.missing(module, whole[1:])
