"""Rollout schedules: known answers of small cases."""

import pytest

from kvcompress.measure.rollout_simulation import continuous_makespan, staleness, static_makespan


def test_a_slot_that_is_free_takes_the_next_output_in_continuous_batches_alone():
    assert static_makespan([9, 1, 1, 1], 2, 1.0) == 10.0
    assert continuous_makespan([9, 1, 1, 1], 2, 1.0) == 9.0


def test_without_staleness_a_step_takes_rollout_training_and_the_way_of_the_weights():
    run = staleness([4.0], workers=2, groups=2, train_s=3.0, sync_s=1.0, stale=0, steps=10)
    assert run.step_s == pytest.approx(8.0) and run.dropped == 0.0
    assert run.utilisation == pytest.approx(3 / 8)


def test_staleness_hides_the_rollout_behind_training():
    fresh, stale = (staleness([4.0], 2, 2, 3.0, 1.0, allowed, 40) for allowed in (0, 2))
    assert stale.step_s < fresh.step_s and stale.step_s == pytest.approx(4.0, rel=0.1)
    assert stale.utilisation > 0.7


def test_the_learner_never_trains_faster_than_its_own_time():
    run = staleness([0.1], 8, 2, 5.0, 0.0, 1, 20)
    assert run.step_s >= 5.0 - 1e-9 and run.utilisation <= 1.0


@pytest.mark.parametrize("wrong", [{"group_s": []}, {"workers": 0}, {"stale": -1}, {"train_s": -1.0}])
def test_numbers_below_their_least_are_refused(wrong):
    given = {"group_s": [1.0], "workers": 1, "groups": 1, "train_s": 1.0, "sync_s": 0.0, "stale": 0, "steps": 1}
    with pytest.raises(ValueError):
        staleness(**(given | wrong))
