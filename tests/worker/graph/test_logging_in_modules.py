"""`--graph onednn`: modules that call loggers are captured where nothing is lost that eager execution writes."""

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from cpulaunch.records.torch_settings import TorchSettings  # noqa: E402
from cpulaunch.worker.graph.silent_logging import silent_call  # noqa: E402
from tests.worker.capturing import Plugin, close, installed  # noqa: E402

pytestmark = pytest.mark.torch
LOGGER = logging.getLogger("tests.logging_in_modules")


@functools.lru_cache(None)
def warning_once(logger: logging.Logger, *args: object) -> None:
    """What transformers adds to Logger."""
    logger.warning(*args)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    torch.manual_seed(0)
    level = LOGGER.level
    with installed(tmp_path, TorchSettings(graph="onednn")) as plugin:
        yield plugin
    LOGGER.setLevel(level)
    warning_once.cache_clear()


class Logging(nn.Module):
    """A module that writes something in each call."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        getattr(LOGGER, self.write)("shape %s", tuple(x.shape))
        return self.linear(x).relu()


def messages(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name == LOGGER.name for record in caplog.records)


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Logging:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    return Logging(request.param).eval()


def call(model: nn.Module, times: int) -> None:
    """Effect: calls the model with the same shape. Raises: AssertionError if a result is not eager's."""
    for _ in range(times):
        value = torch.randn(2, 8)
        close(model(value), nn.functional.linear(value, model.linear.weight, model.linear.bias).relu())


@pytest.mark.parametrize("model", ["debug", "info"], indirect=True)
def test_calls_that_are_not_enabled_are_left_out_until_they_are(plugin, caplog, model) -> None:
    LOGGER.setLevel(logging.WARNING)
    call(model, 5)
    assert plugin.captured() == ["Logging"]
    LOGGER.setLevel(logging.DEBUG)
    call(model, 4)
    assert messages(caplog) == 4


@pytest.mark.parametrize("model", ["info"], indirect=True)
def test_calls_that_logging_disables_as_a_whole_are_left_out_until_it_does_not(plugin, caplog, model) -> None:
    LOGGER.setLevel(logging.INFO)
    logging.disable(logging.INFO)
    try:
        call(model, 5)
        assert plugin.captured() == ["Logging"]
    finally:
        logging.disable(logging.NOTSET)
    call(model, 2)
    assert messages(caplog) == 2


@pytest.mark.parametrize("model", ["warning", "error"], indirect=True)
def test_what_is_written_is_written_in_every_call(plugin, caplog, model) -> None:
    call(model, 6)
    assert "Logging" not in plugin.captured()
    assert messages(caplog) == 6


@pytest.mark.parametrize("model", ["warning_once"], indirect=True)
def test_what_is_written_once_is_written_once_for_each_message(plugin, caplog, model) -> None:
    call(model, 5)
    assert plugin.captured() == ["Logging"]
    assert messages(caplog) == 1
    model(torch.randn(3, 8))
    assert messages(caplog) == 2


@pytest.mark.parametrize("model", ["debug"], indirect=True)
def test_a_method_that_the_program_replaces_is_called(plugin, model, monkeypatch) -> None:
    call(model, 5)
    assert plugin.captured() == ["Logging"]
    written: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(LOGGER, "debug", lambda *args: written.append(args))
        call(model, 2)
    with monkeypatch.context() as patch:
        patch.setattr(logging.Logger, "debug", lambda *args: written.append(args))
        call(model, 2)
    assert len(written) == 4


@pytest.mark.parametrize("model", ["warning_once"], indirect=True)
def test_what_is_written_once_is_written_again_when_the_program_forgets_it(plugin, caplog, model) -> None:
    call(model, 5)
    warning_once.cache_clear()
    call(model, 3)
    assert messages(caplog) == 2


def test_what_is_written_again_after_other_messages_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    function = functools.lru_cache(1)(warning_once.__wrapped__)
    monkeypatch.setattr(logging.Logger, "warning_once", function, raising=False)
    LOGGER.warning_once("one")
    assert silent_call(LOGGER, "warning_once", ["one"]) is None


@pytest.mark.parametrize("setting", ["ignore_logger_methods", "reorderable_logging_functions"])
@pytest.mark.parametrize("model", ["warning"], indirect=True)
def test_what_the_program_leaves_out_where_it_compiles_is_written_elsewhere(plugin, caplog, model, setting) -> None:
    with torch._dynamo.config.patch({setting: {logging.Logger.warning, LOGGER.warning}}):
        call(model, 6)
    assert messages(caplog) == 6


class LoggingTensor(Logging):
    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning_once("value %s", x)
        return self.linear(x).relu()


def test_messages_about_values_are_written_for_each_value(plugin, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    call(LoggingTensor("").eval(), 6)
    assert messages(caplog) == 6


class Asking(Logging):
    """It asks a logger, or an adapter of it, what is enabled."""

    def __init__(self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], way: str) -> None:
        super().__init__("")
        self.logger, self.way = logger, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "log":
            self.logger.log(logging.INFO, "shape %s", tuple(x.shape))
        elif self.way == "method":
            self.logger.info("shape %s", tuple(x.shape))
        elif self.logger.isEnabledFor(logging.INFO):
            self.logger.warning("shape %s", tuple(x.shape))
        return self.linear(x).relu()


@pytest.mark.parametrize("way", ["log", "method", "asks"])
@pytest.mark.parametrize("adapted", [False, True])
def test_other_ways_to_write_nothing_are_left_out_until_something_is_written(plugin, caplog, adapted, way) -> None:
    LOGGER.setLevel(logging.WARNING)
    model = Asking(logging.LoggerAdapter(LOGGER, {}) if adapted else LOGGER, way).eval()
    call(model, 5)
    assert plugin.captured() == ["Asking"]
    LOGGER.setLevel(logging.DEBUG)
    call(model, 4)
    assert messages(caplog) == 4


class Prefixing(logging.LoggerAdapter):
    """An adapter that writes to another logger whatever the level is."""

    def log(self, level: int, message: object, *args: object, **kwargs: object) -> None:
        self.logger.warning(message, *args)


def test_an_adapter_with_methods_of_its_own_is_not_left_out(plugin, caplog) -> None:
    LOGGER.setLevel(logging.WARNING)
    call(Asking(Prefixing(LOGGER, {}), "method").eval(), 5)
    assert messages(caplog) == 5


class Private(Logging):
    def __init__(self) -> None:
        super().__init__("")
        self.logger = logging.Logger("private", logging.WARNING)

    def forward(self, x: Tensor) -> Tensor:
        self.logger.debug("shape %s", tuple(x.shape))
        return self.linear(x).relu()


def test_loggers_that_are_not_known_by_name_cause_no_messages_of_torch(plugin, caplog) -> None:
    call(Private().eval(), 5)
    assert plugin.captured() == ["Private"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
