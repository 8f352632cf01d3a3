"""One export on the driver reaches a Ray that somebody else started; a worker that it misses is named."""

import json
import subprocess
import sys
from collections.abc import Iterator

import cpu_lab
import pytest
from machine import limit

pytestmark = pytest.mark.verl

CLUSTER = """
import ray
here = ray.init(num_cpus=8, num_gpus=2, include_dashboard=False, object_store_memory=100_000_000)
print(here.address_info["gcs_address"], flush=True)
input()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray whose nodes know nothing of FlashPatch."""
    folder = tmp_path_factory.mktemp("cluster")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    env = cpu_lab.environment(folder)
    process = subprocess.Popen([sys.executable, "-c", CLUSTER], env=env, cwd=folder, **pipes)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("\n", timeout=limit(120))


LOOK = """
    import json, os, ray
    ray.init(address=os.environ["CLUSTER"])
    @ray.remote
    def look():
        if "FLASHPATCH" in os.environ:  # a process in which nothing happens has no row
            from flashpatch import ledger
            ledger.note(looked=True)
            ledger.flush()
        return os.getpid(), os.environ.get("FLASHPATCH"), os.environ.get("FLASHPATCH_RUN")
    pid, names, run = ray.get(look.remote())
    print(json.dumps([names, run == os.environ.get("FLASHPATCH_RUN")]))
    if names:
        from flashpatch import ledger
        assert any(row.pid == pid for (run,) in [ledger.read()] for row in run.rows)
"""


def test_the_variable_and_nothing_else_reaches_a_cluster_that_was_running(scenario, cluster):
    assert json.loads(scenario(LOOK, CLUSTER=cluster).splitlines()[-1]) == ["cpu", True]
    assert json.loads(scenario(LOOK, names="", CLUSTER=cluster).splitlines()[-1])[0] is None


def test_a_submitted_job_may_set_it_itself(scenario, cluster):
    """``ray job submit`` hands its environment over in this variable; a key that came twice would raise."""
    job = json.dumps({"runtime_env": {"env_vars": {"FLASHPATCH": "cpu", "MINE": "1"}}})
    said = scenario(LOOK, CLUSTER=cluster, RAY_JOB_CONFIG_JSON_ENV_VAR=job)
    assert json.loads(said.splitlines()[-1])[0] == "cpu"


@pytest.mark.parametrize(
    "names, device", [("cpu,bf16", "cpu"), pytest.param("bf16", "cuda", marks=pytest.mark.full)]
)
def test_a_worker_without_it_is_named(scenario, cluster, names, device):
    """Also in a job for an accelerator, which has no cpu among its names."""
    said = scenario(
        """
        import os, subprocess, sys, ray
        ray.init(address=os.environ["CLUSTER"])
        from verl.single_controller.base import Worker
        from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        class Idle(Worker):
            pass
        def group(**worker_env):
            pool = RayResourcePool([1], use_gpu=True, max_colocate_count=1)
            kwargs = {"worker_env": worker_env} if worker_env else {}
            cls = RayClassWithInitArgs(ray.remote(Idle))
            return RayWorkerGroup(pool, cls, device_name=os.environ["DEVICE"], **kwargs)
        def live():
            done = subprocess.run([os.path.dirname(sys.executable) + "/flashpatch-verify", "--live"],
                                  capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        with_it = group()
        from flashpatch import ledger
        ledger.flush()
        code, text = live()
        assert code == 1 and "wrote no row" not in text, text  # it has done nothing to prove
        without = group(FLASHPATCH="")
        pid = ray.get(without._workers[0].__ray_call__.remote(lambda self: os.getpid()))
        ledger.flush()
        code, text = live()
        print(text)
        assert code == 1, text
        assert f":{pid}" in text and "wrote no row" in text, text
        """,
        names=names,
        CLUSTER=cluster,
        DEVICE=device,
    )
    assert "the environment did not reach it" in said
