"""What a release promises: equal archives, licences that tools find, extras that fit, a wheel that works."""

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.version import Version

from flashpatch import __version__, registry

EPOCH = 1_700_000_000  # as in conftest.py; even, as zip archives count in steps of two seconds
BANNER = re.compile(rb"\(c\)|copyright|released under|@license", re.I)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def components(tree: Path) -> list[dict[str, str]]:
    """The paragraphs of NOTICE that describe a component, as dictionaries."""
    paragraphs = (tree / "NOTICE").read_text().split("\n\n")
    fields = [
        dict(line.split(": ", 1) for line in text.strip().splitlines() if ": " in line) for text in paragraphs
    ]
    return [found for found in fields if "Component" in found]


def sdist(tree: Path, folder: Path) -> bytes:
    code = "from setuptools import build_meta; import sys; print(build_meta.build_sdist(sys.argv[1]))"
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    folder.mkdir()
    subprocess.run([sys.executable, "-c", code, folder], cwd=tree, env=env, check=True, capture_output=True)
    [archive] = folder.iterdir()
    return archive.read_bytes()


@pytest.mark.slow
def test_an_sdist_depends_on_nothing_but_the_files(tree: Path, tmp_path: Path) -> None:
    first = shutil.copytree(tree, tmp_path / "first")
    second = shutil.copytree(tree, tmp_path / "elsewhere" / "second")
    for number, path in enumerate(sorted(second.rglob("*"))):
        os.utime(path, (time.time() - number, time.time() - number))
        path.chmod(path.stat().st_mode ^ 0o020)
    assert sdist(first, tmp_path / "a") == sdist(second, tmp_path / "b")


def test_a_wheel_bears_the_given_time(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        times = {member.date_time for member in archive.infolist()}
    assert times == {time.gmtime(EPOCH)[:6]}


def test_the_metadata_name_every_licence(metadata: Message, components, wheel: Path) -> None:
    expression = metadata["License-Expression"]
    assert canonicalize_license_expression(expression) == expression
    foreign = {part["SPDX-License-Identifier"] for part in components}
    assert set(expression.split(" AND ")) == {"Apache-2.0", *foreign}
    files = metadata.get_all("License-File")
    assert {"LICENSE", "NOTICE"} <= set(files)
    with zipfile.ZipFile(wheel) as archive:
        held = {name.partition(".dist-info/licenses/")[2] for name in archive.namelist()}
    assert set(files) == held - {""}
    named = {Path(file).name for file in files} - {"LICENSE", "NOTICE"}
    assert {part["License file"] for part in components} == named


def test_the_notice_names_all_that_is_vendored_with_its_version(components, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        code = [n for n in archive.namelist() if n.endswith((".js", ".css", ".html", ".py", ".json"))]
        foreign = {n: archive.read(n) for n in code if BANNER.search(archive.read(n)[:2000])}
    files = {part["File"].split(" ")[0] for part in components}
    assert {Path(name).name for name in foreign} == files != set()
    [text] = foreign.values()
    for part in components:
        name = re.escape(part["Component"].lower().encode())
        assert re.search(name + rb" v" + re.escape(part["Version"].encode()) + rb"\b", text.lower()), part


def test_the_description_has_no_link_that_leads_nowhere_elsewhere(metadata: Message, tree: Path) -> None:
    """Until the project has an address, there are no links, no pictures and no pages of the project."""
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    [address] = re.findall(r'^ADDRESS = "(.*)"$', (tree / "setup.py").read_text(), re.M)
    assert all(link.startswith("https://") for link in links) and (len(links) > 20) == bool(address)
    labels = {label.partition(",")[0] for label in metadata.get_all("Project-URL", [])}
    assert labels == ({"Documentation", "Changelog", "Issues"} if address else set())
    assert "What you came for" in text and metadata["Keywords"] and metadata["Author"]


def test_an_extra_asks_for_what_its_patches_need(metadata: Message) -> None:
    """The oldest version that the fp8 family is for: an older one would install and do nothing."""
    asked = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    extras = {one.name: str(one.specifier) for one in asked if one.name in ("vllm", "sglang", "verl")}
    oldest = dict.fromkeys(extras, Version("9999"))
    for requirement in (Requirement(patch.requires) for patch in registry.families()["fp8"].patches):
        least = min(Version(one.version) for one in requirement.specifier if one.operator == ">=")
        if requirement.name in oldest:
            oldest[requirement.name] = min(least, oldest[requirement.name])
    assert extras == {name: f">={least}" for name, least in oldest.items()}


def test_the_installed_wheel_works(installed, tree: Path) -> None:
    assert (installed.site / "flashpatch.pth").read_text() == (tree / "flashpatch.pth").read_text()
    code = "import flashpatch; print(flashpatch.__version__, *flashpatch.enable('fp8').names)"
    assert installed.python(code, PYTHONWARNINGS="ignore") == f"{__version__} fp8"
    done = installed.run("flashpatch", "list", "fp8")
    assert done.returncode == 0, done.stderr
    assert "vllm: not installed" in done.stdout
