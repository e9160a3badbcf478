"""Build step of wheels and editable installs: compile the MKL dispatch library where there is a C compiler.

The library is optional. Without a compiler, or on another platform than x86_64 Linux, the wheel is pure Python and
cpulaunch works without that one feature.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "cpulaunch/lib/mkl_dispatch.c"
LIBRARY = "cpulaunch/lib/libcpulaunch_mkl.so"
PLATFORM = "linux-x86_64"
FLAGS = ("-shared", "-fPIC", "-O2", "-nostdlib", "-Wl,-soname,libcpulaunch_mkl.so", "-Wl,-z,noexecstack")


class MklDispatchHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the library to wheels and puts it into the source tree of editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Effect: compiles, then marks the wheel as platform-specific; leaves it pure if that is not possible."""
        if self.target_name != "wheel" or sysconfig.get_platform() != PLATFORM:
            return
        library = self.compile(self.build_directory())
        if library is None:
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + PLATFORM.replace("-", "_")
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY
            return
        try:
            install(library, Path(self.root, LIBRARY))
        except OSError as error:
            self.app.display_warning(f"cpulaunch: built without --mkl-dispatch: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Effect: removes the compiled file once it is in the wheel."""
        if self.target_name == "wheel":
            shutil.rmtree(self.build_directory(), ignore_errors=True)

    @cache  # noqa: B019 (one hook object per build)
    def build_directory(self) -> Path:
        """A new directory of this build alone."""
        return Path(tempfile.mkdtemp(prefix="cpulaunch-build-"))

    def compile(self, directory: Path) -> Path | None:
        """The compiled library, or None after saying why there is none."""
        compiler = find_compiler()
        if compiler is None:
            self.app.display_warning("cpulaunch: no C compiler (CC, cc, gcc, clang): built without --mkl-dispatch")
            return None
        library = directory / "libcpulaunch_mkl.so"
        command = [*compiler, *FLAGS, "-o", str(library), str(Path(self.root, SOURCE))]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self.app.display_warning(f"cpulaunch: built without --mkl-dispatch: {shlex.join(command)}: {said}")
            return None
        return library


def find_compiler() -> list[str] | None:
    """The C compiler's command: $CC if it is set, else the first usual name on PATH."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    return None


def install(library: Path, target: Path) -> None:
    """Effect: puts the file in place in one step: a running worker may have the old one mapped."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(library, beside)
    beside.replace(target)
