"""A worker without torch that behaves as told by FAKE: a comma-separated list of faults."""

import json
import os
import sys
import time

FAULTS = os.environ.get("FAKE", "").split(",")


def say(**event):
    print(json.dumps(event), flush=True)


if "mute" in FAULTS:
    time.sleep(600)
if "refuse" in FAULTS:
    say(event="refused", problem="no target at /nowhere")
    sys.exit(2)
if "crash" in FAULTS:
    print("ValueError: the reason", file=sys.stderr)
    sys.exit(1)
print("what a library prints is not JSON")
say(event="ready", step=0)
if "deaf" in FAULTS:
    time.sleep(600)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "exit":
        if "stay" in FAULTS:
            time.sleep(600)
        say(event="bye")
        break
    if order["do"] == "train":
        say(event="training", step=1)
        if "hang" in FAULTS:
            time.sleep(600)
        if "error" in FAULTS:
            say(event="error", order="train", problem="OSError: No space left on device")
        else:
            say(event="drafter", folder="/some/drafter-1", step=1)
    say(event="idle", step=1)
