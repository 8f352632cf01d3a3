"""Arm and undo all fp8 patches for verl on the verl and the engine that are installed here.

    python verl_groups.py (examine | arm) GROUP...

of the groups; ends with an error when one cannot be armed or leaves a trace. To examine
them is to compare their contracts with the sources, and imports no framework.
"""

import importlib
import sys

import flashpatch
import flashpatch.engine as engine
from flashpatch.arming.preflight import examine
from flashpatch.patches.fp8 import FAMILY

what, *groups = sys.argv[1:]
ours = [patch for patch in FAMILY.patches if patch.framework in groups]
assert {patch.framework for patch in ours} == set(groups)
if what == "examine":
    for patch in ours:
        found = examine(patch)
        assert found.problem is None, (patch.id, found.problem)
        assert found.installed.version in patch.tested, patch.id
    assert not {"torch", "zmq", "verl", "ray"} & set(sys.modules)
    sys.exit()

flashpatch.enable("cpu")  # lets verl find a platform and vLLM's CPU build
where = {}
for patch in ours:
    module, _, name = patch.targets[0].partition(":")
    owner = importlib.import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    where[patch.id] = (owner, name)


def look():
    """What stands at each target; of a class its members, as a patch may add some."""
    found = {patch: vars(owner)[name] for patch, (owner, name) in where.items()}
    return {patch: dict(vars(one)) if isinstance(one, type) else one for patch, one in found.items()}


before = look()
flashpatch.enable("bf16")
during = look()
for patch in ours:
    native = patch.id == "fp8.verl.validate_config_logprobs"  # verl asks for exact logprobs by itself
    word = "superseded" if native else "installed"
    assert engine.statuses()[patch.id].state.word == word, (patch.id, engine.statuses()[patch.id])
    assert native or during[patch.id] != before[patch.id], patch.id
flashpatch.disable("bf16")
assert look() == before
