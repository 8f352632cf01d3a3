"""EAGLE-3 drafters as published: a reduced vocabulary and a head of their own; EAGLE-1 with a bias on fc."""

import json
import queue

import pytest
import torch
from drafter_lab import SHAPE, capture, cut, fill, make_target, publish
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.drafter_refit import checkpoint
from flashpatch.patches.eagle.train.drafter import make_drafter
from flashpatch.patches.eagle.train.drafter_config import drafter_config
from flashpatch.patches.eagle.train.export import check_round_trip, load_weights, save_drafter
from flashpatch.patches.eagle.train.loss import step_sums
from flashpatch.patches.eagle.train.pack import join, pack
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings
from flashpatch.patches.eagle.train.worker import Worker


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def worker(target, own, folder, **settings):
    """A trainer of a published drafter, with samples of a target."""
    fill(folder / "queue", capture(target, 12))
    given = dict(drafter=str(own), kind="eagle3", dtype="float32", rate=5e-3, tokens=0.5, ttt_steps=2)
    target.save_pretrained(folder / "target")
    where = (str(folder / name) for name in ("target", "queue", "out"))
    events = []
    return Worker(WorkerSettings(*where, **{**given, **settings}), events.append, queue.Queue()), events


@pytest.mark.parametrize(
    ("family", "layer", "vocabulary"),
    [
        ("llama", "midlayer", 40),
        ("qwen2", "layers.0", 40),
        ("qwen3", "midlayer", 40),
        ("llama", "midlayer", None),
    ],
)
def test_a_published_drafter_is_trained_and_the_engine_takes_it_back(family, layer, vocabulary, tmp_path):
    target = make_target(family)
    own = publish(tmp_path / "own", target.config, vocabulary, layer)
    one, events = worker(target, own, tmp_path)
    one._read_samples()
    rows = one._rows()
    before = one.trainer.backward(rows)
    for _ in range(60):
        one.trainer.step(rows)
    found = one.trainer.backward(rows)
    assert found["agreement"] > before["agreement"] + 0.25 and found["agreement_2"] > 0.25, (before, found)
    one._write(found)
    [made] = [tmp_path / event["folder"] for event in events if event["event"] == "drafter"]
    first, last = tensors_of(own), checkpoint.load(made, own, {"embed_tokens"}, "test")
    assert first.keys() == last.keys() == tensors_of(made).keys()
    kept = {name for name in first if torch.equal(first[name], last[name])}
    assert kept == ({"d2t", "t2d"} if vocabulary else set())
    assert {**json.loads((made / "config.json").read_text()), "torch_dtype": "float32"} == json.loads(
        (own / "config.json").read_text()
    )


def test_the_loss_is_over_the_drafters_vocabulary_where_the_target_stays_in_it(tmp_path):
    target = make_target().double()
    own = publish(tmp_path / "own", target.config, 40)
    drafter = make_drafter(drafter_config(target.config, "eagle3", own=own), dtype=torch.float64)
    load_weights(drafter, own)
    embeddings = TargetEmbeddings(target.model.embed_tokens.weight, target.lm_head.weight)
    row = join(cut(capture(make_target(), 6), auxiliary=True)).to("cpu", torch.float64)
    [found] = step_sums(drafter, embeddings, row, 1)
    embedded = embeddings.embed(row.next_ids)[None]
    [outputs] = drafter(row.states[None], embedded, row.positions[None], row.mask())
    mask, tokens, agreed, outside = tensors_of(own)["t2d"], 0.0, 0, 0
    numbers = mask.nonzero()[:, 0]
    for at in row.learn.nonzero()[:, 0].tolist():
        wanted = F.linear(row.targets[at], target.lm_head.weight).detach()
        ours = F.linear(outputs[at], drafter.lm_head.weight).log_softmax(-1).detach()
        if not mask[wanted.argmax()]:
            outside += 1
            continue
        share = wanted.softmax(-1)[mask]
        tokens -= float((share / share.sum() * ours).sum())
        agreed += int(numbers[ours.argmax()] == wanted.argmax())
    assert outside > 3
    assert found.tokens.item() == pytest.approx(tokens, rel=1e-6) and found.agreed.item() == agreed


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_token_embeddings_of_its_own_are_what_a_drafter_reads_where_its_engine_keeps_them(engine, tmp_path):
    target = make_target()
    own = publish(tmp_path / "own", target.config, 40)
    table = torch.randn(target.model.embed_tokens.weight.shape)
    save_file({**tensors_of(own), "embed_tokens.weight": table}, own / "model.safetensors")
    one, events = worker(target, own, tmp_path, engine=engine)
    read = one.trainer.target_embeddings.embedding
    assert torch.equal(read, table if engine == "vllm" else target.model.embed_tokens.weight)
    one._write({})
    written = checkpoint.load(tmp_path / events[-1]["folder"], own, set(), "test")
    assert torch.equal(written["embed_tokens.weight"], table)
    shared = checkpoint.load(tmp_path / events[-1]["folder"], own, {"embed_tokens"}, "test")
    assert written.keys() - shared.keys() == {"embed_tokens.weight"}


def test_a_bias_on_fc_is_trained_for_sglang_and_refused_for_vllm(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    config = drafter_config(target.config)
    own = save_drafter(tmp_path / "own", make_drafter(config).state_dict(), config, "sglang")
    save_file({**tensors_of(own), "fc.bias": torch.ones(SHAPE["hidden_size"])}, own / "model.safetensors")
    check_round_trip(own, tmp_path / "target", "eagle", "sglang")
    with pytest.raises(PatchError, match="fc.bias, which vLLM's EAGLE-1 lacks.*cotrain off"):
        check_round_trip(own, tmp_path / "target", "eagle", "vllm")
    one, events = worker(target, own, tmp_path, kind="eagle", engine="sglang")
    one._read_samples()
    one.trainer.step(pack(cut(capture(target, 4)), 400))
    one._write({})
    written = checkpoint.load(tmp_path / events[-1]["folder"], own, set(), "test")
    assert not torch.equal(written["fc.bias"], torch.ones(SHAPE["hidden_size"]))


@pytest.mark.parametrize(
    ("entries", "change", "said"),
    [
        ({"norm_before_residual": True}, {}, "norm_before_residual=True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state=False"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers=2"),
        ({"vocab_size": 80}, {}, "vocab_size=80 .not 64"),
        ({"draft_vocab_size": 64}, {}, "draft_vocab_size=64 and a tensor d2t"),
        ({}, {"d2t": None}, "draft_vocab_size=40 and no tensor d2t"),
        ({}, {"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({}, {"t2d": torch.ones(64).bool()}, "d2t and t2d that contradict each other"),
        ({}, {"d2t": torch.zeros(40).long() - torch.arange(40)}, "d2t and t2d that contradict"),
        ({}, {"fc_norm.0.weight": torch.ones(32)}, "fc_norm.0.weight"),
        ({}, {"norm.weight": None}, "norm.weight"),
        ({}, {"norm.weight": torch.full((32,), float("nan"))}, "norm.weight in .* holds NaN"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(entries, change, said, tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    own = publish(tmp_path / "own", target.config, 40)
    check_round_trip(own, tmp_path / "target", "eagle3", "vllm")
    (own / "config.json").write_text(json.dumps({**json.loads((own / "config.json").read_text()), **entries}))
    tensors = {name: tensor for name, tensor in {**tensors_of(own), **change}.items() if tensor is not None}
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(PatchError, match=said):
        check_round_trip(own, tmp_path / "target", "eagle3", "vllm")
