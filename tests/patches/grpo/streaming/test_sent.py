"""A streamed round computes what verl's own training worker would, on what is really sent. Models with a state or a convolution
over the row are right padded alone: packed, verl's own engine lets rows into one another."""

import json

import pytest
from tree import SUPPORT

pytestmark = pytest.mark.verl
OVER_THE_ROW = ("convolution", "delta", "mamba")
WRITTEN_BY_THE_STEP = {"global_token_num", "update_lr_scheduler", "disable_auto_offload"}  # when it ends
OPEN = """
    import ast, inspect, json, sys
    from pathlib import Path
    sys.path.append(os.environ["SUPPORT"])
    import flashpatch
    flashpatch.enable("cpu", "bf16", "grpo")
    import stream_kinds as lab
"""


def test_a_round_is_given_all_that_verls_source_gives_a_batch(ranks):
    """A key, or a call on the batch, that another version of verl adds is named here."""
    code = """
    def written(method):
        keys, calls = set(), set()
        for one in ast.walk(ast.parse(inspect.cleandoc(inspect.getsource(getattr(lab.TrainingWorker, method))))):
            if isinstance(one, ast.Call):
                name = ast.unparse(one.func)
                named = {word.arg for word in one.keywords if word.arg}
                keys |= named if name in ("tu.assign_non_tensor", "dict") else set()
                on_batch = one.args and ast.unparse(one.args[0]) in ("data", "mini_batch_td")
                calls |= {name} if on_batch and not name.startswith(("tu.", "self.")) else set()
        return sorted(keys), sorted(calls)
    of_verl = [written(f"{name}_batch") for name in ("train", "infer", "train_mini")]
    print(json.dumps([of_verl, sorted(lab.filled(False)), sorted(lab.filled(True))]))
    """
    (said,) = ranks(OPEN + code, 1, SUPPORT=str(SUPPORT))
    (train, infer, mini), policy, reference = json.loads(said.strip().splitlines()[-1])
    assert train == [policy, []] and infer == [reference, []] and len(policy) >= 5
    assert {*mini[0]} == WRITTEN_BY_THE_STEP and mini[1] == ["maybe_fix_3d_position_ids"]


def test_a_step_on_what_is_sent_is_one_backward_of_the_whole_batch(ranks):
    code = """
    folder, seen, made = Path.cwd(), {}, {kind: lab.write(Path.cwd(), kind) for kind in [*lab.KINDS][:6]}
    for fused in (False, True):  # verl changes a model's class for good
        for kind, (batch, wanted) in made.items():
            for packed in (False, True):
                if not (packed and kind in OVER_THE_ROW):
                    seen[f"{kind} packed={packed} fused={fused}"] = lab.step(folder / kind, batch, wanted, packed, fused)
    print(json.dumps(seen))
    """.replace("OVER_THE_ROW", repr(OVER_THE_ROW))
    (said,) = ranks(OPEN + code, 1, SUPPORT=str(SUPPORT))
    seen = json.loads(said.strip().splitlines()[-1])
    assert len(seen) == 18 and max(max(got.values()) for got in seen.values()) < 1e-5, seen
