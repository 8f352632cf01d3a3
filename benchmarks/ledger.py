"""Count calls of functions, for each process of a large job, that its report takes: seconds follow them, on any machine."""

import cProfile
import json
import pstats
import sys
import tempfile
from pathlib import Path

from flashpatch import registry
from flashpatch.verify.job import collect

NUMBER, AIM, patches = 200 if "--quick" in sys.argv else 2000, 5500, registry.patches()
row = {"roles": ["worker"], "idle": "1", "start": "7", "ppid": 1, "host": "h", "ended": "returned"}
row |= {"notes": {}, "argv0": "", "written": "", "versions": {}, "rank": {}, "error": None}
event = dict(event="update", t=1.0, version=1, outcome="committed", seconds=0.5, rss_bytes=1 << 20)
profile, idle = cProfile.Profile(), dict.fromkeys([*patches][20:], {"state": "waiting", "calls": 0})
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "idle-h-0-1.json").write_text(json.dumps(idle))  # once for all
    for pid in range(2, NUMBER + 2):
        own = {"state": "live", "calls": pid, "detail": f"{pid} calls"}  # no process is like another
        row |= {"pid": pid, "patches": dict.fromkeys([*patches][:20], own)}
        Path(folder, f"row-h-{pid}-7.json").write_text(json.dumps(row))
        Path(folder, f"events-h-{pid}-7.jsonl").write_text(20 * (json.dumps(event) + "\n"))
    profile.runcall(lambda: collect.read(Path(folder)))
calls = round(pstats.Stats(profile).total_calls / NUMBER)
print(f"{calls} calls for each of {NUMBER} processes, aim {AIM}: {'met' if calls <= AIM else 'missed'}")
