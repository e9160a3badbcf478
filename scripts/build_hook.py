"""Build step of wheels and editable installs: compiles the libraries in cpulaunch/lib if a C compiler is installed.

The libraries are optional. Without a compiler, or on a platform other than x86_64 Linux, the wheel is pure Python:
--mkl-dispatch is not available and collectives on one host are slower.
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

FOLDER = "cpulaunch/lib"
PLATFORM = "linux-x86_64"
FLAGS = ("-shared", "-fPIC", "-Wl,-z,noexecstack")
LINEAR_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno")
LIBRARIES = {
    "libcpulaunch_mkl.so": ("mkl_dispatch.c", ("-O2", "-nostdlib"), "--mkl-dispatch"),
    "libcpulaunch_ccl.so": ("ccl_memory.c", ("-O3", "-std=gnu11", "-fwrapv"), "fast collectives on one host"),
    "libcpulaunch_linear.so": ("linear_kernels.c", LINEAR_FLAGS, "--weights"),
}
"""Library -> its source, its compiler flags, and the feature that needs it."""


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the libraries to wheels and puts them into the source tree of editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Effect: compiles, then marks the wheel as platform-specific; leaves it pure if nothing can be compiled."""
        if self.target_name != "wheel" or sysconfig.get_platform() != PLATFORM:
            return
        compiled = self.compile_all(self.build_directory())
        if not compiled:
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + PLATFORM.replace("-", "_")
        for library in compiled:
            target = f"{FOLDER}/{library.name}"
            if version == "editable":
                self.install(library, Path(self.root, target))
            else:
                build_data["force_include"][str(library)] = target

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Effect: removes the compiled file once it is in the wheel."""
        if self.target_name == "wheel":
            shutil.rmtree(self.build_directory(), ignore_errors=True)

    @cache  # noqa: B019 (one hook object per build)
    def build_directory(self) -> Path:
        """A new temporary directory, used by this build only."""
        return Path(tempfile.mkdtemp(prefix="cpulaunch-build-"))

    def compile_all(self, directory: Path) -> list[Path]:
        """The compiled libraries. Effect: warns about each library that could not be compiled."""
        compiler = find_compiler()
        if compiler is None:
            self.warn("no C compiler (CC, cc, gcc, clang)", *LIBRARIES)
            return []
        return [library for name in LIBRARIES if (library := self.compile(compiler, directory / name))]

    def compile(self, compiler: list[str], library: Path) -> Path | None:
        """The compiled library; None if the compiler failed. Effect: warns in that case."""
        source, flags, _ = LIBRARIES[library.name]
        name = f"-Wl,-soname,{library.name}"
        command = [*compiler, *FLAGS, *flags, name, "-o", str(library), str(Path(self.root, FOLDER, source))]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = getattr(error, "stderr", None) or str(error)
            self.warn(f"{shlex.join(command)}: {message}", library.name)
            return None
        return library

    def install(self, library: Path, target: Path) -> None:
        """Effect: replaces the target in one step (running workers may have the old file mapped), or warns."""
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            shutil.copyfile(library, temporary)
            temporary.replace(target)
        except OSError as error:
            self.warn(str(error), library.name)

    def warn(self, reason: str, *names: str) -> None:
        """Effect: displays which features are missing without these libraries, and the reason."""
        *others, last = (LIBRARIES[name][2] for name in names)
        features = f"{', '.join(others)} and {last}" if others else last
        self.app.display_warning(f"cpulaunch: built without {features}: {reason}")


def find_compiler() -> list[str] | None:
    """The C compiler's command: $CC if set, else the first of cc, gcc and clang on PATH; None without a compiler."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    return None
