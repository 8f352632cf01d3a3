"""What travels to a machine without a network: libraries reduced to one capability, and parts that install beside what is there."""

import ctypes
import importlib
import io
import struct
import sys
import tarfile
from pathlib import Path

import pytest
from tree import TREE

PTX, CUBIN = 1, 2


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch):
    """Return a function that imports a script of the bundle."""
    monkeypatch.syspath_prepend(str(TREE / "tests" / "support" / "gpu_bundle"))
    for name in ("prune", "build", "install"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(CUBIN, 80, b"a"), (CUBIN, 90, b"b"), (PTX, 90, b"c"), (CUBIN, 90, b"d")], [1, 3]),
        ([(CUBIN, 80, b"a"), (PTX, 70, b"b"), (PTX, 80, b"c"), (PTX, 100, b"d")], [2]),
        ([(CUBIN, 80, b"longer"), (CUBIN, 100, b"b")], [1]),  # something has to stay
    ],
)
def test_a_library_keeps_what_one_capability_loads(bundle, entries, kept, tmp_path: Path) -> None:
    parts = [
        struct.pack("<HHIQ12xI", kind, 1, 64, 40 * len(code), capability).ljust(64, b"\0") + 40 * code
        for kind, capability, code in entries
    ]
    source, target = tmp_path / "a.so", tmp_path / "b.so"
    source.write_bytes(b"before" + fatbin(*parts) + b"after" + b"\x50\xed\x55\xba no fatbin")
    assert bundle("prune").reduce(source, target, 90) == 1
    got, body = target.read_bytes(), b"".join(parts[at] for at in kept)
    assert len(got) == source.stat().st_size and got.endswith(b"after\x50\xed\x55\xba no fatbin")
    assert got[6:22] == struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body))
    assert got[22:].startswith(body) and not got[22 + len(body) : 22 + sum(map(len, parts))].strip(b"\0")


def test_what_is_there_in_another_version_stays(bundle, tmp_path: Path, monkeypatch) -> None:
    install = bundle("install")
    monkeypatch.setattr(install, "SITE", tmp_path / "site")
    part = tmp_path / "part.tar.xz"
    with tarfile.open(part, "w:xz") as archive:
        for name in ("pytest==0.1/pytest/a.py", "vllm==9/vllm/a.py", "new==1/new/b.py", "new==1/new/c.py"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))
    assert install.install(part) == f"pytest 0.1 (stays {pytest.__version__}), vllm 9, new 1"
    site = tmp_path / "site"
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.py")}
    assert found == {"new/b.py", "new/c.py", "vllm/a.py"}


def test_libraries_load_from_a_part(bundle, tmp_path: Path, monkeypatch) -> None:
    """numpy's were altered by patchelf: without their symbols they do not load."""
    pytest.importorskip("numpy")
    build, install, part = bundle("build"), bundle("install"), tmp_path / "part.tar.xz"
    libraries = [file for file in build.files("numpy") if "numpy.libs/" in file[0]]
    build.pack(part, libraries)
    monkeypatch.setattr(install, "SITE", tmp_path)
    monkeypatch.setattr(install, "installed", lambda name: "")
    install.install(part)
    assert libraries and all(ctypes.CDLL(str(tmp_path / "numpy.libs" / path.name)) for _, path in libraries)
