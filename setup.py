"""The installation by pip: one name in site-packages, `tandem`, with the repository's folders below it as they are."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = "common configs environments examples launcher model report rewards sampler tools/locks trainer"


class Build(build_py):
    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # left by an earlier version
        super().run()
        for name in FOLDERS.split():
            shutil.copytree(name, Path(self.build_lib, "tandem", name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("launch.sh", "sampling.py", "training_worker.py"):
            shutil.copyfile(name, Path(self.build_lib, "tandem", name))


setup(packages=["tandem"], cmdclass={"build_py": Build})
