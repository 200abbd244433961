"""Paired differences, Holm's correction and ranks over tasks, against published examples and naive recomputation."""

from math import exp, inf, log

import numpy as np
import pytest
from scipy import stats

from keel.report.significance import (
    Ranking,
    critical_difference,
    half_width,
    holm,
    mean_difference,
    mean_over_tasks,
    paired_difference,
    rank_methods,
    task_ranks,
)

# Demšar (2006), Table 6: AUC of four variants of C4.5 on fourteen data sets. The paper prints 0.975 for the last two
# variants on voting, but ranks them second and third.
C45 = """
0.763 0.768 0.771 0.798
0.599 0.591 0.590 0.569
0.954 0.971 0.968 0.967
0.628 0.661 0.654 0.657
0.882 0.888 0.886 0.898
0.936 0.931 0.916 0.931
0.661 0.668 0.609 0.685
0.583 0.583 0.563 0.625
0.775 0.838 0.866 0.875
1.000 1.000 1.000 1.000
0.940 0.962 0.965 0.962
0.619 0.666 0.614 0.669
0.972 0.981 0.9751 0.975
0.957 0.978 0.946 0.970
"""
NAMES = ("C4.5", "+m", "+cf", "+m+cf")
TASKS = [dict(zip(NAMES, map(float, line.split()), strict=True)) for line in C45.strip().splitlines()]


def ranking(level: float = 0.05) -> Ranking:
    found = rank_methods(TASKS, level)
    assert found is not None
    return found


def test_the_example_of_demsar_has_its_published_ranks_and_statistics() -> None:
    found = ranking()
    assert {name: round(rank, 3) for name, rank in found.ranks.items()} == {
        "+m+cf": 1.964,
        "+m": 2.000,
        "+cf": 2.893,
        "C4.5": 3.143,
    }
    assert found.chi_square == pytest.approx(9.28, abs=0.01)
    f = 13 * found.chi_square / (14 * 3 - found.chi_square)
    assert f == pytest.approx(3.69, abs=0.01)
    assert found.p == pytest.approx(float(stats.f.sf(f, 3, 39)))
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)
    assert ranking(0.1).critical_difference == pytest.approx(1.12, abs=0.005)


def test_methods_within_the_critical_difference_form_groups() -> None:
    assert ranking().groups == [["+m+cf", "+m", "+cf", "C4.5"]]
    assert ranking(0.1).groups == [["+m+cf", "+m", "+cf"], ["+cf", "C4.5"]]
    apart = Ranking({"a": 1.0, "b": 1.5, "c": 2.4, "d": 4.0}, 10, 0.0, 1.0, critical_difference=1.0)
    assert apart.groups == [["a", "b"], ["b", "c"]]


@pytest.mark.parametrize(("methods", "quantile"), [(2, 1.960), (4, 2.569), (7, 2.949), (10, 3.164)])
def test_critical_differences_use_the_published_quantiles(methods: int, quantile: float) -> None:
    expected = quantile * (methods * (methods + 1) / (6 * 10)) ** 0.5
    assert critical_difference(methods, 10) == pytest.approx(expected, rel=1e-3)


def test_equal_scores_share_the_mean_of_their_ranks() -> None:
    scores = {"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.5, "e": 0.1}
    expected = stats.rankdata([-score for score in scores.values()])
    assert list(task_ranks(scores).values()) == expected.tolist()


def test_methods_that_lack_a_task_are_not_ranked() -> None:
    tasks = [{"a": 1.0, "b": 0.5, "c": 0.2, "d": 0.1}, {"a": 1.0, "b": 0.5, "c": 0.2}]
    found = rank_methods(tasks)
    assert found is not None
    assert found.ranks == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert found.p == 0.0, "all tasks agree"
    assert rank_methods(tasks[:1]) is None
    assert rank_methods([{"a": 1.0, "b": 0.5}] * 3) is None
    assert rank_methods([]) is None


def test_a_paired_difference_is_that_of_scipy() -> None:
    first = {0: 0.79, 1: 0.81, 2: 0.78, 3: 0.83, 7: 0.1}
    second = {0: 0.72, 1: 0.75, 2: 0.74, 3: 0.73, 9: 0.9}
    found = paired_difference(first, second)
    assert found is not None
    common = [0, 1, 2, 3]
    test = stats.ttest_rel([first[seed] for seed in common], [second[seed] for seed in common])
    interval = test.confidence_interval(0.95)
    assert (found.seeds, found.p) == (4, pytest.approx(test.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_students_sleep_data_have_the_published_interval() -> None:
    """Student (1908), the additional hours of sleep by two drugs: t = 4.06, p = 0.0028, interval 0.70 to 2.46."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(dict(enumerate(second)), dict(enumerate(first)))
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.70, 2.46), abs=0.005)
    assert found.p == pytest.approx(0.00283, abs=1e-5)


def test_one_seed_has_no_interval_and_no_seed_no_difference() -> None:
    single = mean_difference([0.1])
    assert (single.mean, single.low, single.high, single.p) == (0.1, -inf, inf, 1.0)
    assert not single.measured
    assert paired_difference({0: 0.1}, {1: 0.2}) is None


def test_differences_without_spread_are_certain() -> None:
    assert mean_difference([0.25, 0.25, 0.25]).p == 0.0
    assert mean_difference([0.0, 0.0]).p == 1.0


def test_an_interval_of_logarithms_becomes_one_of_ratios() -> None:
    ratio = mean_difference([log(0.5), log(0.25)]).map(exp)
    assert ratio.mean == pytest.approx(0.125**0.5)
    assert ratio.low < ratio.mean < ratio.high


def test_half_the_width_of_an_interval_uses_students_quantiles() -> None:
    assert half_width([1.0, 2.0]) == pytest.approx(12.706 * np.std([1.0, 2.0], ddof=1) / 2**0.5, rel=1e-4)


def test_holm_corrects_step_by_step() -> None:
    # Holm (1979) as in R's documentation of p.adjust: the largest of (n - i + 1) p so far, at most one
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.04, 0.01, 0.9]) == pytest.approx([0.08, 0.03, 0.9])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_mean_over_tasks_of_one_size_is_welchs_interval() -> None:
    first, second = [0.1, 0.3, 0.2, 0.25], [-0.2, 0.1, 0.0, 0.15]
    found = mean_over_tasks([mean_difference(first), mean_difference(second)])
    # the mean of two means is half the difference of the first and the negative second, for which Welch's test is made
    test = stats.ttest_ind(first, [-value for value in second], equal_var=False)
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low / 2, interval.high / 2))
    assert found.p == pytest.approx(test.pvalue)
    assert found.seeds == 8


def test_the_mean_over_one_task_is_that_of_the_task() -> None:
    one = mean_difference([0.1, 0.3, 0.2])
    found = mean_over_tasks([one])
    assert (found.mean, found.low, found.high, found.p) == pytest.approx((one.mean, one.low, one.high, one.p))
    certain = mean_over_tasks([mean_difference([0.1, 0.1]), mean_difference([0.3, 0.3])])
    assert (certain.low, certain.high, certain.p) == pytest.approx((0.2, 0.2, 0.0))
