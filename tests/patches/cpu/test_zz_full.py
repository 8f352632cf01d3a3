import os, time, threading, subprocess, sys
from pathlib import Path
import verl_job
from verl_job import SEPARATE
MODEL = "actor_rollout_ref.model"
ADAPTERS = f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=16 actor_rollout_ref.actor.optim.lr=3e-2".split()
LED = Path("/tmp/w/full8/led")
def test_full(wide_world, tmp_path):
    job = verl_job.start(wide_world, tmp_path, *SEPARATE, *ADAPTERS, FLASHPATCH="cpu,bf16,fsdp", FLASHPATCH_LEDGER=str(LED))
    try:
        verl_job.wait(job, tmp_path, lambda: "training/global_step:1" in verl_job.said(tmp_path) or "step:1 " in verl_job.said(tmp_path), 900)
        fd = os.open(LED/"filler", os.O_CREAT|os.O_WRONLY)
        try:
            while True: os.write(fd, b"0"*4096)
        except OSError as e: print("FULL", e)
        code = job.wait(900)
    finally:
        verl_job.end(job)
    said = verl_job.said(tmp_path)
    print("CODE", code); print(said[-6000:])
    env = verl_job.environment(tmp_path, FLASHPATCH_LEDGER=str(LED))
    for c in (["--live"],):
        done = subprocess.run([Path(sys.executable).with_name("flashpatch-verify"), *c], env=env, capture_output=True, text=True)
        print("LIVE", done.returncode, done.stdout, done.stderr)
