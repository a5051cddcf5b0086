# SPDX-License-Identifier: Apache-2.0
"""The build's one step beyond pyproject.toml: compile libkestrel.so and emit the cffi module into the package.

The library is loaded by cffi in ABI mode, so one wheel serves every Python 3 of a platform: py3-none-<platform>.
"""
import importlib.util
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent


def load_csrc_build():
    spec = importlib.util.spec_from_file_location("kestrel_csrc_build", str(ROOT / "csrc" / "build.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


csrc_build = load_csrc_build()


class BuildWithLibrary(build_py):
    def run(self):
        if not self.editable_mode:  # a module deleted since the last build must not come back from build/lib
            shutil.rmtree(str(Path(self.build_lib, "kestrel")), ignore_errors=True)
        super().run()
        out = ROOT / "kestrel" if self.editable_mode else Path(self.build_lib).resolve() / "kestrel"
        try:
            csrc_build.build(out=out, target="lib")
            csrc_build.emit_cffi(out)
        except csrc_build.BuildError as error:
            raise SystemExit(str(error))

    def get_outputs(self, include_bytecode=True):
        made = [] if self.editable_mode else [
            str(Path(self.build_lib, "kestrel", name)) for name in (csrc_build.LIBRARY, "_kestrel_cffi.py")]
        return sorted(set(super().get_outputs(include_bytecode) + made))

    def get_source_files(self):     # what an sdist needs besides the package
        return super().get_source_files() + [str(p.relative_to(ROOT)) for p in csrc_build.sources()]


class PlatformWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class WithLibrary(Distribution):
    def has_ext_modules(self):      # platlib, and a platform in the wheel's name
        return True


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
