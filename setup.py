"""Builds libmtraining_ops.so with CMake and puts it into the package; everything else is in pyproject.toml."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def get_ext_filename(self, name: str) -> str:
        return "libmtraining_ops.so"  # not an extension module: no suffix of the interpreter

    def build_extension(self, extension: Extension) -> None:
        torch = importlib.util.find_spec("torch")
        if torch is None:
            sys.exit(
                "mtraining: torch 2.11.0 is missing: pip install torch==2.11.0, or build without --no-build-isolation"
            )
        build = ROOT / "build" / "pip"
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 4))
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        configure += [
            f"-DMTRAINING_TORCH_DIR={torch.submodule_search_locations[0]}",
            f"-DMT_PYTHON={sys.executable}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run(
            ["cmake", "--build", str(build), "--target", "mtraining_ops", "--parallel", jobs],
            check=True,
        )
        target = pathlib.Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / "lib" / "libmtraining_ops.so", target)


setup(ext_modules=[Extension("mtraining.libmtraining_ops", [])], cmdclass={"build_ext": CMakeBuild})
