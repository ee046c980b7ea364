"""Statistics of boards against scipy, closed forms and plain loops; and that chance alone is hardly ever marked."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.report import stats
from kvcompress.report.run_index import Entry
from kvcompress.report.seeds import over_seeds

few = st.lists(st.floats(-1, 1, allow_nan=False).map(lambda v: round(v, 3)), min_size=2, max_size=8)


def test_standard_error_is_the_closed_form():
    assert stats.standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3 / 4))
    assert stats.standard_error([0.5]) is None


@pytest.mark.parametrize("level", [0.75, 0.95, 0.975, 0.995])
def test_students_quantiles_are_the_closed_forms_of_one_and_two_degrees_of_freedom(level):
    off = 2 * level - 1
    assert stats.student_quantile(level, 1) == pytest.approx(math.tan(math.pi * off / 2), rel=1e-9)
    assert stats.student_quantile(level, 2) == pytest.approx(off * math.sqrt(2 / (1 - off * off)), rel=1e-9)


def test_students_quantiles_agree_with_a_printed_table():
    for freedom, value in ((1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)):
        assert stats.student_quantile(0.975, freedom) == pytest.approx(value, abs=6e-4)


def test_an_interval_of_real_valued_scores_is_students():
    scores = [0.2, 0.5, 0.4, 0.9, 0.55]  # no two alike
    found = stats.score_interval(scores)
    reach = 2.7764451 * np.std(scores, ddof=1) / math.sqrt(5)
    assert (found.low, found.high) == pytest.approx((np.mean(scores) - reach, np.mean(scores) + reach), abs=1e-6)
    assert found.mean == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"), [(5, 5, 0.5655, 1.0), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)]
)
def test_an_interval_of_right_or_wrong_is_wilsons(right, n, low, high):
    """The last is Newcombe's (1998) worked example."""
    found = stats.score_interval([1.0] * right + [0.0] * (n - right))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_of_one_real_valued_score_is_left_open():
    assert stats.score_interval([0.3]) == stats.Interval(0.3, None, None, None)
    with pytest.raises(ValueError, match="at least one sample"):
        stats.score_interval([])


@given(st.integers(1, 60), st.data())
def test_wilsons_interval_holds_the_share_and_lies_within_0_and_1(n, data):
    k = data.draw(st.integers(0, n))
    low, high = stats.wilson(k / n, n)
    assert 0 <= low <= k / n <= high <= 1 and high - low > 0


def test_a_bootstrap_interval_agrees_with_the_normal_one_on_many_samples():
    """For a mean of many samples the percentile bootstrap is mean ± 1.96 standard errors, up to its own noise."""
    deltas = np.random.default_rng(3).normal(-0.1, 0.3, size=400)
    low, high = stats.bootstrap(deltas)
    error = stats.standard_error(deltas)
    assert (low, high) == pytest.approx((deltas.mean() - 1.96 * error, deltas.mean() + 1.96 * error), abs=0.1 * error)


def test_a_bootstrap_of_three_samples_is_the_full_enumeration():
    """27 resamples of three differences, each as likely: the exact quantiles of their means."""
    deltas = np.array([-0.6, 0.1, 0.3])
    means = sorted(np.mean(draw) for draw in itertools.product(deltas, repeat=3))
    assert stats.bootstrap(deltas, level=0.5) == pytest.approx((means[6], means[20]), abs=0.05)
    assert stats.bootstrap(deltas, level=0.9999) == pytest.approx((means[0], means[-1]))


def test_a_bootstrap_agrees_with_scipys():
    scipy = pytest.importorskip("scipy.stats", reason="scipy is no dependency; the closed forms' tests stay")
    deltas = np.random.default_rng(5).beta(0.5, 0.5, size=30) - 0.6
    theirs = scipy.bootstrap((deltas,), np.mean, method="percentile", n_resamples=9999, rng=1).confidence_interval
    assert stats.bootstrap(deltas) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def by_hand(deltas):
    """The sign-flip test by looking at every assignment."""
    seen = abs(sum(deltas))
    sums = [
        abs(sum(s * d for s, d in zip(signs, deltas, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(deltas))
    ]
    return sum(value >= seen - 1e-9 * sum(map(abs, deltas)) for value in sums) / len(sums)


@given(few)
def test_the_sign_flip_test_is_the_enumeration_of_all_signs(deltas):
    assert stats.sign_flip(np.array(deltas)) == pytest.approx(by_hand(deltas), abs=1e-12)


def test_the_sign_flip_test_of_right_or_wrong_is_mcnemars_exact_test():
    """Eight samples lost, one gained, eleven alike: twice the binomial tail of 1 of 9."""
    deltas = np.array([-1.0] * 8 + [1.0] + [0.0] * 11)
    assert stats.sign_flip(deltas) == pytest.approx(2 * (1 + 9) / 2**9)


def test_a_drawn_sign_flip_test_agrees_with_scipys_permutation_test():
    scipy = pytest.importorskip("scipy.stats", reason="scipy is no dependency; the enumeration's test stays")
    deltas = np.random.default_rng(7).normal(0.12, 0.4, size=40)
    theirs = scipy.permutation_test((deltas,), np.mean, permutation_type="samples", n_resamples=50000, rng=2).pvalue
    assert stats.sign_flip(deltas) == pytest.approx(theirs, abs=0.01)


def test_five_samples_that_all_fall_are_not_called_certain():
    found = stats.difference([-1.0] * 5)
    assert found.p == 2 / 32 and found.low == -1.0 and found.high > 0
    assert stats.least_samples(1) == 6 and stats.difference([-1.0] * 6).p < 0.05


def test_differences_are_of_the_samples_that_both_have():
    deltas = stats.paired({"a": 1.0, "b": 0.0, "c": 0.5}, {"b": 1.0, "c": 0.25, "d": 1.0})
    assert deltas.tolist() == [-1.0, 0.25]
    assert stats.difference(stats.paired({"a": 1.0}, {"b": 1.0})) is None


def test_holms_correction_is_that_of_a_worked_example():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_corrected_p_values_keep_their_order_and_never_fall(values):
    corrected = stats.holm(values)
    assert all(c >= p for c, p in zip(corrected, values, strict=True)) and max(corrected) <= 1.0
    for (p, c), (q, d) in itertools.combinations(zip(values, corrected, strict=True), 2):
        assert (c - d) * (p - q) >= 0
    assert min(corrected) == pytest.approx(min(1.0, len(values) * min(values)))


def test_twenty_methods_that_differ_by_chance_alone_are_hardly_ever_marked():
    """20 methods, 50 right-or-wrong samples, all with the baseline's chance: about one board in twenty has a mark.

    Without the correction one board in four would have one, and more with more samples.
    """
    draw = np.random.default_rng(11)
    boards, marked, plain = 200, 0, 0
    for _ in range(boards):
        base = draw.random(50) < 0.6
        p = [stats.sign_flip((draw.random(50) < 0.6).astype(float) - base) for _ in range(20)]
        marked += min(stats.holm(p)) < stats.SIGNIFICANT
        plain += min(p) < stats.SIGNIFICANT
    assert marked <= 0.09 * boards and plain >= 0.2 * boards


def test_a_real_loss_is_marked_among_twenty_methods_that_lose_nothing():
    draw = np.random.default_rng(13)
    base = (draw.random(80) < 0.8).astype(float)
    p = [stats.sign_flip(base * (draw.random(80) < 0.4) - base), *[stats.sign_flip(base - base) for _ in range(20)]]
    corrected = stats.holm(p)
    assert corrected[0] < 0.001 and min(corrected[1:]) == 1.0


def test_at_equal_bytes_a_run_near_is_taken_and_else_two_around_are_joined():
    points = [(0.5, 0.9), (0.25, 0.5), (0.1, 0.1)]
    assert stats.at_bytes(points, 0.252) == {"score": 0.5, "interpolated": False}
    found = stats.at_bytes(points, 0.3)
    assert found["interpolated"] and found["score"] == pytest.approx(0.5 + 0.4 * 0.05 / 0.25)
    assert (
        stats.at_bytes(points, 0.6) is None and stats.at_bytes(points, 0.05) is None and stats.at_bytes([], 0.5) is None
    )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=15))
def test_the_front_is_the_points_that_no_other_beats(points):
    def beaten(a):
        return any((b[0] <= a[0] and b[1] >= a[1]) and b != a for b in points)

    front = [points[i] for i in stats.pareto(points)]
    assert sorted(front) == sorted({p for p in points if not beaten(p)})
    assert front == sorted(front)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30))
def test_no_interval_of_a_score_has_width_zero_and_each_holds_its_mean(scores):
    found = stats.score_interval(scores)
    assert 0 <= found.low <= found.mean <= found.high <= 1 and found.high - found.low > 1 / len(scores) / 2


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 1.0]), min_size=2, max_size=30))
def test_no_interval_of_a_difference_has_width_zero(deltas):
    found = stats.difference(deltas)
    assert -1 <= found.low <= found.mean <= found.high <= 1 and found.high - found.low > 1 / len(deltas)


@pytest.mark.parametrize("n", range(2, 12))
def test_the_interval_of_samples_that_all_fall_leaves_out_zero_where_the_test_marks_them(n):
    found = stats.difference([-1.0] * n)
    assert (found.high < 0) == (found.p < stats.SIGNIFICANT)


def test_the_unseen_share_is_clopper_and_pearsons_bound_for_none_of_n():
    scipy = pytest.importorskip("scipy.stats")
    for n in (2, 5, 40):
        assert stats.unseen_share(n) == pytest.approx(scipy.binomtest(0, n).proportion_ci(method="exact").high)


def test_equal_real_valued_scores_may_hide_a_share_that_scores_otherwise():
    found = stats.score_interval([0.5] * 5)
    assert (found.low, found.high) == pytest.approx((0.5 * 0.025**0.2, 1 - 0.5 * 0.025**0.2))


def test_intervals_of_few_samples_hold_the_true_mean_about_as_often_as_they_say():
    """Zero-inflated scores, as F1 of short answers: with five samples Student's alone holds the mean far less often."""
    draw, held, students = np.random.default_rng(17), 0, 0
    for _ in range(400):
        scores = np.where(draw.random(5) < 0.7, 0.0, draw.random(5))
        found = stats.score_interval(scores)
        held += found.low <= 0.15 <= found.high
        low, high = stats.student(scores.mean(), scores.std(ddof=1) / math.sqrt(5), 5)
        students += low <= 0.15 <= high
    assert held >= 0.93 * 400 and students < 0.87 * 400


def test_samples_needed_tell_a_difference_of_that_size_with_the_power_they_state():
    deltas = np.random.default_rng(19).normal(-0.2, 0.5, 40)
    needed = stats.samples_needed(deltas)
    draw, told = np.random.default_rng(23), 0
    for _ in range(200):
        told += stats.sign_flip(draw.normal(deltas.mean(), deltas.std(ddof=1), needed)) < stats.SIGNIFICANT
    assert 0.7 <= told / 200 <= 0.9


def test_no_number_of_samples_is_named_where_no_difference_was_seen():
    assert stats.samples_needed([0.0, 0.0]) is None and stats.samples_needed([1.0, -1.0]) is None
    assert stats.samples_needed([-1.0] * 3) == 6, "fewer can never be marked"
    assert stats.samples_needed([-1.0] * 3, comparisons=16) == stats.least_samples(16)


def test_a_sample_that_every_run_had_counts_once():
    """Five runs of two samples are two samples where each run had the same, and ten where each had its own."""
    same = stats.pooled([{"a": 1.0, "b": 0.0}] * 5)
    own = stats.pooled([{f"a{seed}": 1.0, f"b{seed}": 0.0} for seed in range(5)])
    assert (same.counted, own.counted) == ("5 runs of 2 samples (the same)", "5 runs of 2 samples")
    assert (same.low, same.high) == stats.wilson(0.5, 2) and (own.low, own.high) == stats.wilson(0.5, 10)


@given(st.integers(2, 6), st.integers(0, 40))
def test_signs_flipped_together_give_the_p_values_of_each_alone(n, seed):
    deltas = np.random.default_rng(seed).choice([-0.5, 0.0, 0.25, 1.0], size=(n, 4))
    assert stats.sign_flips(deltas) == pytest.approx([stats.sign_flip(column) for column in deltas.T])


def test_ranks_have_ranges_and_methods_that_cannot_be_told_apart_share_them():
    draw = np.random.default_rng(29)
    good = (draw.random(60) < 0.9).astype(float)
    alike = good.copy()
    alike[:2] = 1 - alike[:2]
    bad = (draw.random(60) < 0.2).astype(float)
    assert stats.rank_bounds([good, bad, alike]) == [(1, 2), (3, 3), (1, 2)]
    assert stats.rank_bounds([good[:4], bad[:4]]) == [(1, 2), (1, 2)], "four samples rank nothing"


def test_runs_that_differ_in_more_than_their_seed_are_no_repetitions(tmp_path):
    def entry(seed, wording):
        folder = tmp_path / "sweep" / f"{seed}{wording}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"seed: {seed}\ntask: {{name: jsonl, wording: {wording}, seed: {seed}}}\n")
        record = {
            "status": "ok",
            "seed": seed,
            "method": "full",
            "budget": 1.0,
            "score": 0.5,
            "task": "jsonl",
            "model": "m",
        }
        made = Entry(record, folder / "record.json")
        made.scores = {"a": 0.0, "b": 1.0}
        return made

    found = over_seeds([entry(0, "plain"), entry(1, "plain"), entry(2, "other")])
    assert [row["pooled"].counted for row in found] == ["2 runs of 2 samples (the same)"]
    shorter = stats.pooled([{"a": 1.0, "b": 0.0}, {"a": 1.0}])
    assert shorter.counted == "2 runs of at most 2 samples"
