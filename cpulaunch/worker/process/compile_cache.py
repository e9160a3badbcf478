"""The folder of code that torch.compile has compiled: what is in it is loaded, so no other user may change it."""

from __future__ import annotations

import getpass
import os
import re
import tempfile

from cpulaunch.records.torch_settings import TorchSettings
from cpulaunch.system.files.caches import make_private, open_cache_folder, user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def install(settings: TorchSettings) -> str:
    """Effect: makes torch.compile keep its code in a private folder, unless the user named one in the environment.

    Raises: RuntimeError if there is none.
    """
    if VARIABLE in os.environ:
        return ""
    names = [settings.compile_cache] if settings.compile_cache else []
    os.environ[VARIABLE] = folder = _private_folder(names)
    return f"compiled code in {folder}"


def _private_folder(names: list[str]) -> str:
    """torch's default folder, or this user's cache where others can change that; in it, the folder of these names."""
    machine = os.uname().nodename  # A home may be shared by machines with other CPUs.
    own = user_cache(f"inductor-{machine}", os.environ)
    own = os.path.realpath(own) if os.path.isabs(own) else own
    for path, make in ((_default(), make_private), (own, _make_cache)):
        try:
            folders = [os.path.join(path, *names[:count]) for count in range(len(names) + 1)]
            if make(path) and all(map(make_private, folders[1:])):
                return folders[-1]
        except (OSError, ValueError):
            continue
    raise RuntimeError(f"other users can change {_default()}, and {own} is unusable; set {VARIABLE}")


def _default() -> str:
    """torch's folder, without links. Source: torch 2.13, torch/_inductor/runtime/cache_dir_utils.py."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(os.path.realpath(tempfile.gettempdir()), f"torchinductor_{name}")


def _make_cache(path: str) -> bool:
    """As `make_private`, with the folders above. Raises: OSError or ValueError."""
    if not os.path.isabs(path):
        return False
    os.close(open_cache_folder(path))
    return make_private(path)
