"""Comparison of losses with the noise between seeds."""

import pytest
from losses import compare_losses, format_losses

LOSSES = {"bert": {"python": [2.0, 2.0], "autocast": [2.0, 2.2], "other": [3.0, 3.0]}}


def test_means_are_compared_in_deviations_of_eager_bf16() -> None:
    compared = compare_losses(LOSSES)["bert"]
    assert compared["python"]["noises"] == pytest.approx(-0.1 / 0.02**0.5)
    assert compared["python"]["within_noise"] is True
    assert compared["other"]["within_noise"] is False
    assert compared["autocast"] == pytest.approx({"mean": 2.1, "deviation": 0.02**0.5, "noises": 0, "within_noise": 1})


@pytest.mark.parametrize("eager", [{}, {"autocast": [2.0]}, {"autocast": [2.0, 2.0]}])
def test_no_verdict_without_noise(eager: dict[str, list[float]]) -> None:
    assert compare_losses({"bert": {"python": [2.0], **eager}})["bert"]["python"] == {"mean": 2.0}


def test_a_nan_loss_is_not_within_the_noise() -> None:
    compared = compare_losses({"bert": {"python": [float("nan"), 2.0], "autocast": [2.0, 2.2]}})
    assert compared["bert"]["python"]["within_noise"] is False


def test_table_names_steps_and_noise() -> None:
    table = format_losses(LOSSES, 50)
    assert table.startswith("mean loss after 50 steps")
    assert "2.1000 ±0.1414 (+0.0 deviations)" in table
