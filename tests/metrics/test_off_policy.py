"""Off-policy gap: known answers, written down by hand from the definitions."""

import math

import numpy as np
import pytest

from kvcompress.metrics import off_policy

MU, PI = [0.5, 0.2, 0.8], [0.4, 0.3, 0.8]


@pytest.fixture
def three():
    return off_policy.deltas(np.log(MU), np.log(PI))[0]


def test_three_tokens_give_the_written_ratios_and_divergences(three):
    assert np.exp(three) == pytest.approx([0.8, 1.5, 1.0])
    assert off_policy.kl(three) == pytest.approx(-0.060774, abs=1e-6)
    assert off_policy.k3(three) == pytest.approx(0.039226, abs=1e-6)
    assert off_policy.chi2_token(three) == pytest.approx(0.296667, abs=1e-6)


def test_three_tokens_give_the_written_sequence_weights_and_sample_size(three):
    assert math.exp(three.sum()) == pytest.approx(1.2) and math.exp(three.mean()) == pytest.approx(1.062659, abs=1e-6)
    assert off_policy.ess(three) == pytest.approx(0.9332, abs=1e-4)


def test_rejected_tokens_leave_the_denominator():
    delta = np.array([0.1, -1.5, 0.8, -10, 0.3])
    kept = off_policy.mask(delta)
    assert kept.tolist() == [True, False, False, False, True]
    assert np.exp(delta) == pytest.approx([1.11, 0.22, 2.23, 4.5e-5, 1.35], abs=5e-3)
    assert off_policy.masked_mean(np.array([1.0, 9, 9, 9, 3.0]), kept) == 2.0
    assert off_policy.masked_mean(np.ones(2), np.zeros(2, dtype=bool)) == 0.0


def test_weights_are_cut_at_the_limit():
    assert off_policy.truncated(np.log([0.5, 3.0]), 2.0).tolist() == [pytest.approx(0.5), 2.0]


def test_a_token_that_the_scorer_rules_out_is_counted_and_stays():
    delta, never = off_policy.deltas([-1.0, -1.0], [-math.inf, -1.0])
    assert never.tolist() == [True, False] and delta[0] == pytest.approx(off_policy.LOG_ZERO + 1)
    assert math.isfinite(off_policy.kl(delta)) and off_policy.rejected([delta], 1e-4) == 1.0


@pytest.mark.parametrize("mu, pi", [([-1.0], [-1.0, -2.0]), ([-math.inf], [-1.0]), ([-1.0], [math.nan])])
def test_log_probabilities_that_are_none_are_refused(mu, pi):
    with pytest.raises(ValueError):
        off_policy.deltas(mu, pi)


def test_a_group_of_equal_rewards_has_no_advantages():
    assert off_policy.advantages([0.0] * 4) == [0.0] * 4
    assert sum(off_policy.advantages([1.0, 0.0, 0.0])) == pytest.approx(0.0, abs=1e-9)


def test_sequence_chi_square_stays_finite_where_its_ratios_do_not():
    assert off_policy.log_chi2_sequence(np.array([1000.0, 0.0])) == pytest.approx(2000 - math.log(2))
    assert off_policy.log_chi2_sequence(np.zeros(3)) == pytest.approx(0.0)


def test_pass_at_k_is_one_minus_the_chance_of_drawing_only_failures():
    assert off_policy.pass_at(1, [1, 0, 0, 0]) == 0.25 and off_policy.pass_at(4, [1, 0, 0, 0]) == 1.0
    assert off_policy.pass_at(2, [1, 0, 0, 0]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="from 1 to"):
        off_policy.pass_at(5, [1, 0])
