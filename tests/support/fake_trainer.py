"""Act as a worker without torch, with the faults that FAKE lists, separated by commas."""

import json
import os
import sys
import time

FAULTS = os.environ.get("FAKE", "").split(",")


def report(**event):
    print(json.dumps(event), flush=True)


if "mute" in FAULTS:
    time.sleep(600)
if "refuse" in FAULTS:
    report(event="refused", problem="no target at /nowhere")
    sys.exit(2)
if "crash" in FAULTS:
    print("ValueError: the reason", file=sys.stderr)
    sys.exit(1)
print("what a library prints is not JSON")
report(event="ready", step=0)
if "deaf" in FAULTS:
    time.sleep(600)
for line in sys.stdin:
    command = json.loads(line)
    if command["command"] == "exit":
        report(event="bye")
        break
    report(event="got", **command)
    if command["command"] == "train":
        report(event="training", step=1)
        if "hang" in FAULTS:
            time.sleep(600)
        if "error" in FAULTS:
            report(event="error", command="train", problem="OSError: No space left on device")
        else:
            report(event="drafter", folder="/some/drafter-1", step=1)
    report(event="idle", command=command["command"], step=1)
