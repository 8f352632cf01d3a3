"""What setup.cfg cannot say: packages, the description, two files at the top of site-packages, equal sdists."""

import gzip
import os
import re
import tarfile
from distutils.command.install_data import install_data
from pathlib import Path

from setuptools import Distribution, find_packages, setup  # before distutils, which it provides
from setuptools.command.sdist import sdist

#: Where the project lives; a release puts its address here. Until then no link and no picture leaves this folder.
ADDRESS = ""


class FrontDoorDistribution(Distribution):
    """Answers ``editable_wheel``, which asks for ``has_data`` before it runs ``install_data``."""

    has_data = Distribution.has_data_files


class install_front_doors(install_data):
    """Installs ``data_files`` at the top of site-packages instead of under ``sys.prefix``.

    ``.pth`` and ``.start`` files are read there and nowhere else. Wheels and editable wheels both run this
    command and record its files, so that ``pip uninstall`` removes them.
    """

    def finalize_options(self):
        self.set_undefined_options(
            "install", ("install_lib", "install_dir"), ("root", "root"), ("force", "force")
        )


class reproducible_sdist(sdist):
    """Writes equal bytes for equal files where ``SOURCE_DATE_EPOCH`` (seconds since 1970) is set.

    Order, times, owners and modes come from nothing but the names and that variable. Wheels need no such
    command: setuptools obeys the variable in them.
    """

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", mtime=int(epoch), fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for found in sorted([Path(base_dir), *Path(base_dir).rglob("*")]):
                # A hard link to a file of the tree would be stored as a link where two of them meet.
                archive.inodes.clear()
                archive.add(found, recursive=False, filter=plain)
        return path


def packages():
    """All packages under the names that ``package_dir`` in setup.cfg gives them."""
    yield from find_packages(include=["flashpatch", "flashpatch.*"])
    for folder in ("patches", "verify"):
        yield f"flashpatch.{folder}"
        yield from (f"flashpatch.{folder}.{name}" for name in find_packages(folder))


def long_description():
    """README, with links and pictures that lead from anywhere to files of this project; without an address their text."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not ADDRESS:
        text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.S)
        return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    text = re.sub(r'((?:src|srcset)=")(?=docs/)', rf"\1{ADDRESS}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{ADDRESS}/blob/main/", text)


def project_urls():
    """Pages of the project by name, once it has an address."""
    pages = {
        "Documentation": "/blob/main/docs/README.md",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: ADDRESS + page for name, page in pages.items()} if ADDRESS else {}


setup(
    url=ADDRESS,
    project_urls=project_urls(),
    long_description=long_description(),
    long_description_content_type="text/markdown",
    distclass=FrontDoorDistribution,
    packages=list(packages()),
    cmdclass={"install_data": install_front_doors, "sdist": reproducible_sdist},
)
