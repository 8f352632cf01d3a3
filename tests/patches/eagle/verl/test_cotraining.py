"""One job's drafter, with replicas and a trainer that do what a test asks; the real ones are in
test_job.py."""

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE
from flashpatch.patches.eagle.verl import cotraining


class Trainer:
    """Stands for `Coordinator`: a process that ends each slice with another drafter."""

    def __init__(self, settings, environment):
        self.settings, self.environment = settings, environment
        self.drafter, self.figures, self.problem = None, {}, ""
        self.state, self.pid, self.commands, self.counts = "idle", 1, [], Counter()

    def start(self):
        return True

    def train(self, seconds):
        self.commands.append(("train", seconds))
        self.counts["slices"] += 1
        self.drafter = Path(f"drafter-{len(self.commands)}")
        return True

    def stop(self):
        self.commands.append(("stop",))

    def wait_idle(self, limit):
        return True

    def order(self, **orders):
        self.commands += [(name, Path(folder).name) for name, folder in orders.items()]

    def close(self):
        self.commands.append(("close",))


class Replicas:
    """Engines that note what is called; each answers as its one worker would."""

    def __init__(self, count=2):
        self.calls, self.refuses = [], ""
        self.broken = set()  # those that take no drafter
        self.states = [
            dict(queue="/queue", requests=3, drafter=0, drafter_path="own", acceptance=2.0)
        ] * count

    def __call__(self, method, given):
        self.calls.append((method, *given))
        if method == self.refuses:
            raise RuntimeError("no")
        if method == UPDATE:
            path, version = given
            for number in set(range(len(self.states))) - self.broken:
                self.states[number] = {**self.states[number], "drafter": version, "drafter_path": path}
            if self.broken:
                raise RuntimeError("cannot read the file")
        return [[state] for state in self.states]

    def made(self, method):
        return [call[1:] for call in self.calls if call[0] == method]


@pytest.fixture
def one(tmp_path, monkeypatch):
    monkeypatch.setattr(cotraining, "Coordinator", Trainer)
    return cotraining.Job({"target": "t", "folder": str(tmp_path)}, 60.0)


def step(one, replicas, number):
    one.rollouts_ended()
    one.policy_updated(replicas, number)


def test_each_new_drafter_is_sent_once_and_the_trainer_follows_the_policy(one, tmp_path):
    replicas = Replicas()
    one.policy_updated(replicas, 0)  # before the first rollout: there is a trainer now, and nothing to send
    assert one.coordinator.settings.queue == "/queue" and not replicas.made(UPDATE)
    step(one, replicas, 1)
    one.policy_updated(replicas, 2)  # no slice in between
    step(one, replicas, 3)
    sent = replicas.made(UPDATE)
    assert [version for _, version in sent] == [1, 2] and sent[0][0] != sent[1][0]
    assert [name for what, name in one.coordinator.commands if what == "target"][-1] == "shared-000000003-4"
    assert one.metrics["eagle/drafter_version"] == 2 and one.metrics["eagle/acceptance_length"] == 2.0
    assert one.metrics["eagle/captured"] == 6


def test_slices_in_which_nothing_is_trained_are_a_problem(one, caplog):
    replicas = Replicas()
    for number in range(3):
        assert "is not trained" not in caplog.text
        step(one, replicas, number)
        one.coordinator.figures = {"samples": 3}
    assert "is not trained: 3 samples, and it needs 8" in caplog.text


def test_a_drafter_that_one_replica_refused_has_a_version_of_its_own(one):
    replicas = Replicas()
    one.policy_updated(replicas, 0)
    replicas.broken = {1}
    step(one, replicas, 1)
    assert replicas.states[0]["drafter_path"] != replicas.states[1]["drafter_path"] == "own"
    assert one.metrics["eagle/drafter_version"] == 0
    replicas.broken = set()
    step(one, replicas, 2)
    assert [version for _, version in replicas.made(UPDATE)] == [1, 2]
    assert one.metrics["eagle/drafter_version"] == 2


@pytest.mark.parametrize("method", [UPDATE, SAVE_EMBEDDINGS, FLUSH])
def test_what_fails_is_said_and_stops_nothing(one, caplog, method):
    replicas = Replicas()
    one.policy_updated(replicas, 0)
    replicas.refuses = method
    step(one, replicas, 1)
    step(one, replicas, 2)
    assert "no" in caplog.text
    assert [version for _, version in replicas.made(UPDATE)] == ([] if method == FLUSH else [1, 2])
    replicas.refuses = ""
    step(one, replicas, 3)
    assert one.metrics["eagle/drafter_version"] == (1 if method == FLUSH else 3)


def test_replicas_that_capture_to_different_places_are_not_trained_on(one, caplog):
    replicas = Replicas()
    replicas.states[1] = {**replicas.states[1], "queue": "/elsewhere"}
    one.policy_updated(replicas, 0)
    assert one.coordinator is None and "/elsewhere" in caplog.text and not replicas.made(UPDATE)


def test_states_of_the_trainer_need_no_replica_that_captures(one, tmp_path):
    replicas, queue = Replicas(), tmp_path / "samples"
    queue.mkdir()
    (queue / "left").touch()
    one.settings["queue"] = str(queue)
    replicas.states = [{**state, "queue": f"/{place}"} for place, state in enumerate(replicas.states)]
    one.policy_updated(replicas, 0)
    assert one.coordinator.settings.queue == str(queue) and not queue.exists()
    assert replicas.made(FLUSH) == [(False,)]
    step(one, replicas, 1)
    assert one.metrics["eagle/acceptance_length"] == 2.0 and len(replicas.made(UPDATE)) == 1


def test_old_embeddings_are_cleared_away(one, tmp_path):
    def call(method, given):
        if method == SAVE_EMBEDDINGS:
            Path(given[0]).mkdir()
        return [[dict(queue="/queue")]]

    (tmp_path / "shared-000000098").mkdir()  # of an earlier run
    for number in (99, None, None, 100, 50):
        one.policy_updated(call, number)
        target = one.coordinator.commands[-1][1]
        assert (tmp_path / target).exists()
    assert len({name for what, name in one.coordinator.commands if what == "target"}) == 5
    assert len(list(tmp_path.iterdir())) == 2


def test_the_trainer_sees_the_accelerator_it_is_given_though_the_driver_sees_none(one):
    one.settings["device"] = "cuda:3"
    one.policy_updated(Replicas(), 0)
    assert one.coordinator.environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert one.coordinator.settings.device == "cuda"


def test_training_may_rest_for_some_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(cotraining, "Coordinator", Trainer)
    one = cotraining.Job({"target": "t", "folder": str(tmp_path)}, 60.0, every=3)
    replicas = Replicas()
    one.policy_updated(replicas, 0)
    for number in range(1, 7):
        step(one, replicas, number)
    trained = [command for command in one.coordinator.commands if command[0] == "train"]
    assert trained == [("train", 60.0)] * 2
    assert [folder.split("-")[-1] for (folder,) in replicas.made(SAVE_EMBEDDINGS)] == [
        "3",
        "6",
    ]  # before them alone


@pytest.mark.parametrize(
    ("beside", "looks", "expected"),
    [
        ((), "00 00 11 01 11 01 01 01", "train"),  # one that waits for its next request has not drained
        ((), "0 0 1 1 0 0", ""),  # one replica alone
        ((), "01 01 11 11 10 10", "train stop train"),  # others' requests follow, as after a validation
        ("b", "01 01 11 11 10 10", "train"),
    ],
)
def test_a_slice_begins_once_a_replica_has_drained(one, monkeypatch, beside, looks, expected):
    monkeypatch.setattr(cotraining, "_LOOK_SECONDS", 0.001)
    one.policy_updated(Replicas(), 0)
    one.coordinator.commands.clear()
    left, over = iter(looks.split()), threading.Event()
    monkeypatch.setattr(
        cotraining.logger, "warning", lambda *said: over.set()
    )  # none is left: a router that does not answer
    one.rollouts_began(lambda: dict(zip("ab", map(int, next(left)), strict=False)), set(beside))
    assert over.wait(10)
    one.rollouts_ended()
    *early, (last, *_) = one.coordinator.commands
    assert " ".join(command for command, *_ in early) == expected and last == "train"


def test_the_replicas_on_the_trainers_device_have_to_drain():
    replicas = [
        SimpleNamespace(replica_rank=rank, world_size=2, gpus_per_node=8, _server_address=rank)
        for rank in range(8)
    ]
    assert cotraining._beside(replicas, "cuda:7") == {3, 7}  # of two nodes
    assert cotraining._beside(replicas, "cuda:8") == cotraining._beside(replicas, "") == set()
