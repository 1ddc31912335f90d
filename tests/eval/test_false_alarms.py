"""Clean runs of the toy's test: alarms are counted, and too many or too few of them are seen."""

import numpy as np
import pytest

from conf.schema import HydraConfig, Rule
from eval.certificate import LEVEL
from eval.false_alarms import alarm_lines, counted, false_alarms
from eval.mutations import MUTATIONS
from eval.patching import Changes


def test_uniform_p_values_are_within_what_a_binomial_allows() -> None:
    rng = np.random.default_rng(0)
    found = [counted(rng.random(200).tolist()) for _ in range(300)]
    assert sum(one["within"] for one in found) >= 297
    own, usual = found[0]["levels"]
    assert (own["level"], own["allowed"], usual["level"]) == (LEVEL, [0, 1], 0.05)
    assert 0 < usual["allowed"][0] < 10 < usual["allowed"][1] < 30 and found[0]["runs"] == 200


@pytest.mark.parametrize("p_values", [[0.01] * 30 + [0.5] * 170, [0.5] * 200, [1e-5] * 2 + [0.04] * 8 + [0.5] * 190])
def test_a_test_that_is_wrong_too_often_or_too_seldom_is_seen(p_values: list[float]) -> None:
    assert not counted(p_values)["within"]


def test_the_clean_loop_raises_no_alarm_and_a_fault_does() -> None:
    config = HydraConfig(lookup=True)
    clean = false_alarms(config, Rule.auto, 20, texts=300)
    assert clean["within"] and (clean["drafter"], clean["texts"], clean["runs"]) == ("lookup+hydra", 300, 20)
    assert alarm_lines(clean)[0] == (
        "20 clean runs of 300 texts with lookup+hydra: 0 false alarms at level 0.0001 (0.00%; 0 to 1 allowed)"
    )
    with Changes() as changes:
        MUTATIONS[0].plant(changes)
        assert not false_alarms(config, Rule.auto, 20, texts=300)["within"]
