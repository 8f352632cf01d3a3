"""Read how much of the host's memory this process may still use."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes that the kernel says are available, no more than the container's limit leaves; 0 if unknown."""
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # another kernel, or no limit
        pass
    return min(found, default=0)
