"""Recording tables for the search, and reading them back."""

import json
import re

import pytest
from tuning_tables import PROGRAMS, combinations, key_of, read_samples, record_samples, slowest_and_best

from cpulaunch.measure.samples import Sample
from cpulaunch.measure.tuning.space import Dimension
from cpulaunch.measure.tuning.tables import read_table

SPACE = (Dimension(name="threads", values=(None, 1)), Dimension(name="graph", values=(None, "onednn")))


def rate(configuration):
    return 10.0 + 5 * ("threads" in configuration)


def sample(configuration):
    if configuration.get("graph") and configuration.get("threads"):
        return Sample(value=None, seconds=1.0, failure="it exited with code 1")
    return Sample(value=rate(configuration), seconds=1.0)


def recorded_in(file, samples=1, launch=sample):
    recorded = read_samples(file, "mlp", SPACE)
    record_samples(recorded, file, list(combinations(SPACE)), launch, samples=samples)
    return recorded


def test_a_recorded_table_can_be_replayed(tmp_path):
    recorded_in(tmp_path / "mlp.json", samples=1)
    table = read_table(json.loads((tmp_path / "mlp.json").read_text()))
    assert table.space == SPACE
    assert table.median_speed({}) == 10.0
    assert table.best_speed == table.median_speed({"threads": 1}) == 15.0
    assert table.samples[frozenset({("threads", 1), ("graph", "onednn")})] == "it exited with code 1"


def test_a_recording_goes_on_where_it_was_interrupted(tmp_path):
    launched = []

    def launch(configuration):
        if len(launched) == 2:
            raise KeyboardInterrupt
        launched.append(configuration)
        return sample(configuration)

    with pytest.raises(KeyboardInterrupt):
        recorded_in(tmp_path / "mlp.json", launch=launch)
    again = []
    recorded_in(tmp_path / "mlp.json", launch=lambda configuration: again.append(configuration) or sample({}))
    assert launched + again == list(combinations(SPACE))
    recorded_in(tmp_path / "mlp.json", samples=1, launch=pytest.fail)


def test_a_table_of_another_space_is_not_mixed_with(tmp_path):
    recorded_in(tmp_path / "mlp.json")
    with pytest.raises(SystemExit, match="another program, space or machine"):
        read_samples(tmp_path / "mlp.json", "mlp", SPACE[:1])


def test_the_summary_names_the_best_settings(tmp_path):
    assert slowest_and_best(recorded_in(tmp_path / "mlp.json")) == ("10.0", "10.0", "15.0", "threads=1")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pattern_finds_the_programs_rate(name):
    unit = "tokens/s decode" if name == "generation" else "samples/s"
    printed = {"generation": "llama"}.get(name, name)
    assert re.search(PROGRAMS[name][1], f"{printed}: 12.50 {unit}").group(1) == "12.50"


def test_a_configuration_is_known_by_its_texts():
    assert key_of({"graph": "onednn", "threads": 1}) == frozenset({("graph", "onednn"), ("threads", "1")})
