"""Pack a small framework, ``toyfw``, as a site-packages, a wheel or an sdist, and give a patch for it."""

import tarfile
import zipfile
from pathlib import Path

from flashpatch.record import Contract, Patch

PATCH = Patch(
    id="fam.toyfw.load",
    targets=("toyfw.engine:Engine.load",),
    requires="toyfw>=1",
    why="",
    how="",
    remove_when="",
    wrapper=print,
    contract=Contract(params=("weights",), exists=("torch.nn:Module", "toyfw:VERSION")),
    tested=("1.0",),
)
HOLDS = "class Engine:\n    def load(self, weights): ...\n"
DRIFTED = "class Engine:\n\n    def load(self, buckets): ...\n"


def site(folder: Path, version: str, engine: str, distribution: str = "toyfw") -> Path:
    """A site-packages with one distribution that owns ``toyfw``."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("toyfw/__init__.py,,\ntoyfw/engine.py,,\n")
    package = folder / "toyfw"
    package.mkdir()
    (package / "__init__.py").write_text("VERSION = 1\nraise AssertionError('imported')\n")
    (package / "engine.py").write_text(engine)
    return folder


def wheel(tmp_path: Path, version: str, engine: str, distribution: str = "toyfw") -> Path:
    folder = site(tmp_path / f"site-{distribution}-{version}", version, engine, distribution)
    path = tmp_path / f"{distribution}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    return path


def sdist(tmp_path: Path, version: str, engine: str, inside: str = "src") -> Path:
    project = tmp_path / f"toyfw-{version}"
    site(project / inside, version, engine)
    for info in (project / inside).glob("*.dist-info"):
        for file in info.iterdir():
            file.unlink()
        info.rmdir()
    (project / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: toyfw\nVersion: {version}\n\nText.\n")
    path = tmp_path / f"toyfw-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(project, project.name)
    return path
