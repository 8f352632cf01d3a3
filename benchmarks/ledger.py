"""Count calls of functions, for each process of a large job, that its verdict takes: seconds follow them, on any machine."""

import cProfile
import json
import pstats
import sys
import tempfile
from pathlib import Path

from flashpatch import registry
from flashpatch.ledger import runs
from flashpatch.verify.live import judge

NUMBER, AIM, patches = 200 if "--quick" in sys.argv else 2000, 3000, registry.patches()
row = {"roles": ["worker"], "idle": "1", "start": "7", "ppid": 1, "host": "h", "ended": "returned"}
row |= {"notes": {}, "argv0": "", "written": "", "versions": {}, "rank": {}, "error": None}
row["patches"] = dict.fromkeys([*patches][:20], {"state": "live", "calls": 3})
profile, idle = cProfile.Profile(), dict.fromkeys([*patches][20:], {"state": "waiting", "calls": 0})
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "idle-h-0-1.json").write_text(json.dumps(idle))  # once for all
    for pid in range(2, NUMBER + 2):
        Path(folder, f"row-h-{pid}-7.json").write_text(json.dumps({**row, "pid": pid}))
    profile.runcall(lambda: judge(runs.read_run(Path(folder)), patches))
calls = round(pstats.Stats(profile).total_calls / NUMBER)
print(f"{calls} calls for each of {NUMBER} processes, aim {AIM}: {'met' if calls <= AIM else 'missed'}")
