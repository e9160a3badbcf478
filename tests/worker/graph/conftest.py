"""The plugin inside torch with `--graph onednn`, installed for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worker.capturing import Plugin


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    torch = pytest.importorskip("torch")
    from cpulaunch.records.torch_settings import TorchSettings
    from tests.worker.capturing import installed

    torch.manual_seed(0)
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        yield plugin
