"""What setup.cfg cannot say: the list of packages, and two files at the top of site-packages."""

from distutils.command.install_data import install_data

from setuptools import Distribution, find_packages, setup  # before distutils, which it provides


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


def packages():
    """All packages under the names that ``package_dir`` in setup.cfg gives them."""
    yield from find_packages(include=["flashpatch", "flashpatch.*"])
    for folder in ("patches", "verify"):
        yield f"flashpatch.{folder}"
        yield from (f"flashpatch.{folder}.{name}" for name in find_packages(folder))


setup(
    distclass=FrontDoorDistribution,
    packages=list(packages()),
    cmdclass={"install_data": install_front_doors},
)
