"""Where paths lead, as the launcher follows them."""

import os

from cpulaunch.system.files.paths import locate, open_folder


def opened(path, **options):
    """The path of the folder that was opened."""
    fd = open_folder(str(path), **options)
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def located(path):
    """The path of a file, reached through trusted links alone, and whether it is a link of /proc."""
    place = locate(str(path))
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{place.folder}"), place.name), place.is_proc
    finally:
        os.close(place.folder)
