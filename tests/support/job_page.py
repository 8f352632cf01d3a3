"""Write the run of a job that never ran, and open a page in a headless Chromium."""

import json
import shutil
import subprocess
import tempfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

_BEGAN = 1_750_000_000.0


class Reader(HTMLParser):
    """Collect the texts of a document's body by the section they are in, and its elements."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.section, self.hidden = "", ""
        self.texts: dict[str, list[str]] = {}
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(document.replace("<wbr>", ""))

    def handle_starttag(self, tag: str, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["aria-labelledby"]
        self.hidden = tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            self.texts.setdefault(self.section, []).append(unescape(data))

    def text(self, section: str) -> str:
        return " | ".join(self.texts.get(section, ()))


def find_browser() -> str | None:
    """Return the command of a Chromium; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def dump(browser: str, page: Path, *options: str) -> str:
    """Open a page in a headless browser without network; return its document once it is drawn.

    Raises:
        subprocess.CalledProcessError: the browser failed.
        AssertionError: it printed a message of the page's console."""
    with tempfile.TemporaryDirectory(prefix="flashpatch-browser-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command += ["--enable-logging=stderr", "--window-size=1280,2400", *options]
        command += ["--dump-dom", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return done.stdout


def write_run(folder: Path, updates: int) -> Path:
    """Write the rows of a driver and a worker that are gone, and the events of the worker's updates; return ``folder``."""
    folder.mkdir()
    took = {"seconds": 1.5, "load_seconds": 0.9, "commit_seconds": 0.2, "buckets": 5, "rss_bytes": 3 << 30}
    what = {"event": "update", "outcome": "committed", "role": "target", **took}
    lines = (json.dumps({"n": n, "t": _BEGAN + 60 * n, "version": n, **what}) for n in range(1, updates + 1))
    (folder / "events-made-up-2-7.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for pid, role, notes in ((1, "driver", {}), (2, "worker", {"policy_version": updates})):
        row = {
            **{
                "kind": "row",
                "run": folder.name,
                "host": "made-up",
                "pid": pid,
                "start": "7",
                "ppid": pid - 1,
            },
            **{"argv0": "python", "roles": [role], "rank": {}, "versions": {"python": "3.11"}, "error": None},
            **{"patches": {}, "notes": notes, "first_written": _BEGAN, "written": "2025-06-15T16:00:00+0000"},
        }
        (folder / f"row-made-up-{pid}-7.json").write_text(json.dumps(row))
    return folder
