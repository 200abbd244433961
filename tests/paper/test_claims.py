"""The claims of the paper as statistics, from made-up results."""

from math import exp, log
from typing import Any

import pytest

from keel.paper.claims import all_claims, better_methods, find_tasks, is_large, theorem_summary
from keel.paper.evidence import Claim, Question, answer, contrast, effect_text
from keel.paper.ladder_cost import relative_costs
from keel.paper.views import make_view
from keel.report.significance import mean_difference

SPREAD = (0.0, 0.004, -0.003, 0.002, -0.001)
"""What the seeds add to the accuracy of every method, with another factor for each."""


def row(
    method: str, accuracy: float | None, seeds: int = 5, reached: int | None = None, **fields: Any
) -> dict[str, Any]:
    name, *overrides = method.split()
    settings = {"algorithm.name": name, **fields} | {
        field: int(value) for field, value in (each.split("=") for each in overrides)
    }
    base = {"method": method, "label": method, "values": {}, "wanted": seeds, "settings": settings}
    base |= {"printed": None, "printed_cost": None}
    if accuracy is None:
        return {**base, "runs": 0}
    factor = 1 + len(method) % 7 / 10
    finals = [accuracy + factor * spread for spread in SPREAD[:seeds]]
    found = {"algorithm": name, "runs": seeds, "status": "finished", "accuracy_seeds": finals, "accuracy_std": 0.002}
    found |= {"accuracy_mean": sum(finals) / seeds, "seed_numbers": list(range(seeds))}
    if reached is not None:
        found["rounds_to_target_seeds"] = [reached + seed for seed in range(seeds)]
        found |= {"rounds_to_target": reached, "cost": {"share": reached / 100, "bytes": reached * 1000.0}}
    return {**base, **found}


def part(title: str, rows: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    defaults = {"data.name": title, "data.partition": "dirichlet", "data.alpha": 0.0, "data.clients": 100}
    defaults |= {"participation.rate": 0.1, "participation.sampler": "uniform", "evaluation.last": 10}
    spec = defaults | {name.replace("__", "."): value for name, value in spec.items()}
    return {"title": title, "rounds": 100, "seeds": 5, "tuned": "", "trials": 9, "printed": None} | {
        "spec": spec,
        "rows": rows,
    }


def ladder(*parts: dict[str, Any]) -> dict[str, Any]:
    texts = {"name": "ladder", "number": "", "title": "Ladder", "kind": "figure", "against": "", "finds": ""}
    return {"ladder": {**texts, "view": "ladder", "scale": "desktop", "command": "c", "parts": list(parts)}}


def claim(results: dict[str, Any], number: str) -> Claim:
    return next(claim for claim in all_claims(results) if claim.title.startswith(f"{number}. "))


def methods(**accuracies: float) -> list[dict[str, Any]]:
    return [row(name, accuracy) for name, accuracy in accuracies.items()]


def test_a_claim_is_supported_if_one_member_is_above_all_others_on_every_task() -> None:
    first = part("a", methods(fedavg=0.7, fedavgm=0.75, fedcm=0.7, ghbm=0.74, fedhbm=0.8))
    second = part("b", methods(fedcm=0.5, ghbm=0.6))
    found = claim(ladder(first, second), "1a")
    assert found.verdict == "supported"
    assert [line[:2] + line[4:] for line in found.lines()] == [
        ["a", "fedhbm / fedavgm", "for"],
        ["b", "ghbm / fedcm", "for"],
    ]
    assert found.summary()[0] == "**supported**: 2 for"
    assert found.summary()[2:] == ["2", "5"]
    assert found.effect is not None
    assert 0.05 < found.effect.low < found.effect.mean < found.effect.high < 0.1


def test_the_member_of_the_family_is_selected_by_its_search() -> None:
    rows = [row("fedcm", 0.5), row("ghbm", 0.7) | {"search_score": 0.8}, row("fedhbm", 0.6) | {"search_score": 0.9}]
    [question] = claim(ladder(part("a", rows)), "1a").questions
    assert len(question.favoured) == 1
    assert question.effect.first == "fedhbm"


def test_verdicts_count_tasks_for_and_against() -> None:
    good, bad = methods(fedcm=0.5, ghbm=0.6), methods(fedcm=0.6, ghbm=0.5)
    level = [row("fedcm", 0.5), {**row("ghbm", 0.5), "accuracy_seeds": [0.52, 0.48, 0.51, 0.47, 0.53]}]

    def verdict(*tasks: list[dict[str, Any]]) -> str:
        return claim(ladder(*(part(str(number), rows) for number, rows in enumerate(tasks))), "1a").verdict

    assert verdict(good, level) == "partly"
    assert verdict(good, good, bad) == "partly"
    assert verdict(good, bad) == "not supported"
    assert verdict(level) == "not supported"
    assert verdict() == "not run"


def test_a_single_seed_is_shown_and_does_not_count() -> None:
    rows = [row("fedcm", 0.5, seeds=1), row("ghbm", 0.6, seeds=1)]
    found = claim(ladder(part("a", rows)), "1a")
    assert found.verdict == "not run"
    assert found.lines() == [["a", "ghbm / fedcm", "+10.0", "-", "one seed"]]


def test_seeds_are_paired_by_number() -> None:
    other = row("fedcm", 0.5) | {"seed_numbers": [5, 6, 7, 8, 0]}
    [question] = claim(ladder(part("a", [other, row("ghbm", 0.6)])), "1a").questions
    assert question.effect.difference.seeds == 1


def test_methods_that_have_not_run_and_tasks_without_one_side_are_left_out() -> None:
    rows = [row("fedcm", None), row("fedacg", 0.5), row("ghbm", 0.6), row("fedhbm", None)]
    found = claim(ladder(part("a", rows), part("b", methods(ghbm=0.5)), part("c", [row("fedcm", None)])), "1a")
    assert [line[1] for line in found.lines()] == ["ghbm / fedacg"]


def test_any_of_several_favoured_methods_costs_a_factor_and_all_others_cost_none() -> None:
    clear = contrast("a", "b", {0: 0.3, 1: 0.31, 2: 0.32}, {0: 0.1, 1: 0.12, 2: 0.1})
    weak = contrast("a", "c", {0: 0.3, 1: 0.31, 2: 0.32}, {0: 0.28, 1: 0.31, 2: 0.25})
    assert clear is not None
    assert weak is not None
    assert Question("t", [[clear, weak]]).p_for == weak.difference.p
    assert Question("t", [[clear], [weak]]).p_for == pytest.approx(2 * clear.difference.p)
    assert Question("t", [[clear], [weak]]).effect is clear
    assert Question("t", [[clear, weak]]).effect is weak
    below = contrast("b", "a", {0: 0.1, 1: 0.12, 2: 0.1}, {0: 0.3, 1: 0.31, 2: 0.32})
    assert below is not None
    assert Question("t", [[below, clear]]).p_against == pytest.approx(2 * below.difference.p)
    assert Question("t", [[below], [clear]]).p_against == 1.0


def test_p_values_are_corrected_for_the_number_of_tasks() -> None:
    each = contrast("a", "b", {0: 0.30, 1: 0.31, 2: 0.32}, {0: 0.26, 1: 0.29, 2: 0.28})
    assert each is not None
    assert 0.025 < each.difference.p < 0.05
    assert [outcome.result for outcome in answer([Question("t", [[each]])])] == ["for"]
    assert [outcome.result for outcome in answer([Question("t", [[each]]), Question("u", [[each]])])] == [
        "open",
        "open",
    ]


def test_iid_tolerates_half_a_point() -> None:
    def found(loss: float) -> Claim:
        rows = methods(fedavg=0.9, ghbm=0.9 - loss)
        return claim(ladder(part("a", rows, data__partition="iid"), part("b", methods(fedavg=0.1, ghbm=0.9))), "4")

    assert (found(0.002).verdict, len(found(0.002).questions)) == ("supported", 1)
    assert [outcome.result for outcome in found(0.05).outcomes] == ["against"]
    assert claim(ladder(part("a", methods(fedavg=0.9, ghbm=0.9), data__alpha=1e4)), "4").verdict == "supported"


def tau_results(best: int) -> dict[str, Any]:
    accuracies = {tau: 0.9 - 0.02 * abs(log(tau / best)) for tau in (1, 5, 10, 20)}
    rows = [row("fedavg", 0.8), *(row(f"ghbm algorithm.tau={tau}", value) for tau, value in accuracies.items())]
    return {"tau": {"parts": [part("a", rows)]}}


def test_tau_is_compared_with_one_and_with_every_other() -> None:
    results = tau_results(best=10)
    assert [claim(results, number).verdict for number in ("2a", "2b")] == ["supported", "supported"]
    [line] = claim(results, "2a").lines()
    assert line[:2] == ["a", "tau = 10 / tau = 1"]
    results = tau_results(best=5)
    assert [claim(results, number).verdict for number in ("2a", "2b")] == ["supported", "not supported"]
    assert claim(results, "2b").lines()[0][1] == "tau = 10 / tau = 5"


def test_a_heat_map_has_a_task_for_each_participation_rate() -> None:
    rows = [
        row("ghbm", 0.9 - 0.02 * abs(log(tau * rate)), **{"algorithm.tau": tau, "participation.rate": rate})
        for rate in (0.1, 0.05)
        for tau in (1, 10, 20)
    ]
    found = claim({"tau-participation": {"parts": [part("a", rows)]}}, "2b")
    assert [line[0] for line in found.lines()] == ["a, C = 10 %", "a, C = 5 %"]
    assert found.verdict == "supported"


def test_bytes_are_compared_as_ratios_by_seed() -> None:
    rows = [row("fedavg", 0.7, reached=80), row("fedhbm", 0.8, reached=40), row("fedacg", 0.8, reached=20)]
    results = ladder(part("a", rows))
    [line] = claim(results, "3a").lines()
    assert line[2].startswith("× 0.51 (0.5")
    assert claim(results, "3a").verdict == "supported"
    assert claim(results, "3b").lines()[0][1] == "fedhbm / fedacg"
    assert claim(results, "3b").verdict == "not supported"


def test_a_seed_that_never_reaches_the_target_counts_with_all_rounds() -> None:
    never = row("fedavg", 0.7, reached=80) | {"rounds_to_target_seeds": [None] * 5}
    [question] = claim(ladder(part("a", [never, row("fedhbm", 0.8, reached=50)])), "3a").questions
    expected = mean_difference([log(100 / (50 + seed)) for seed in range(5)])
    assert question.effect.difference.mean == pytest.approx(expected.mean)


def test_the_deviation_falls_if_every_step_to_a_larger_tau_lowers_it() -> None:
    def found(*means: float) -> Claim:
        deviation = {
            str(tau): {"second_half_seeds": [mean + spread / 10 for spread in SPREAD]}
            for tau, mean in zip((1, 5, 10, 20), means, strict=True)
        }
        return claim({"deviation": {"parts": [part("a", [{**row("fedavg", 0.5), "deviation": deviation}])]}}, "5")

    assert found(1.5, 1.2, 1.0, 2.0).verdict == "supported", "20 is above 1/C"
    assert found(1.5, 1.2, 1.0, 2.0).lines()[0][1:3] == ["tau = 10 / tau = 1", "× 0.67 (0.67 to 0.67)"]
    assert found(1.5, 1.0, 1.2, 2.0).outcomes[0].result == "against"


def test_large_scale_tasks_have_many_or_natural_clients_of_which_few_take_part() -> None:
    rows = methods(fedavg=0.7, adabest=0.9, fedhbm=0.8, ghbm_theory=0.95)
    parts = [
        part("writers", rows, data__partition="key", participation__rate=0.02),
        part("many", rows, data__clients=500, participation__rate=0.01),
        part("few", rows, participation__rate=0.01),
        part("often", rows, data__clients=500),
    ]
    assert [task.title for task in find_tasks(ladder(*parts)) if is_large(task)] == ["writers", "many"]
    assert {line[1] for line in claim(ladder(*parts), "6").lines()} == {"fedhbm / adabest"}


def test_a_task_of_several_results_counts_once() -> None:
    results = ladder(part("a", methods(fedcm=0.5, ghbm=0.6)))
    results["controlled"] = {"parts": [part("a", methods(fedcm=0.6, ghbm=0.5))]}
    assert [task.source for task in find_tasks(results)] == ["ladder"]


def test_the_theorem_holds_if_the_gradient_does_not_grow_with_g() -> None:
    def summary(*ghbm: float) -> list[str]:
        records = [
            {"method": name, "G": G, "T": T, "median": value / T, "low": 0.9 * value / T, "high": 1.1 * value / T}
            for name, values in (("GHBM (theory)", ghbm), ("FedCM", (1.0, 100.0, 10_000.0)))
            for G, value in zip((1, 10, 100), values, strict=True)
            for T in (100, 1000)
        ]
        return theorem_summary({"records": records})

    assert summary(1.0, 1.0, 1.5)[0] == "**supported**: 2 of 2 G"
    assert summary(1.0, 1.0, 1.5)[1] == "GHBM × 1.5 (1.23 to 1.83), FedCM × 1e+04 from G = 1 to 100"
    assert summary(1.0, 1.0, 9.0)[0] == "**partly**: 1 of 2 G"
    assert summary(1.0, 3.0, 9.0)[0] == "**not supported**: 0 of 2 G"
    assert theorem_summary({})[0] == "**not run**"


def test_methods_above_the_family_are_listed() -> None:
    results = ladder(part("a", methods(fedavg=0.5, scaffold=0.8, fedhbm=0.7, ghbm=0.6)), part("b", methods(fedavg=0.5)))
    assert [line[:3] for line in better_methods(results)] == [["a", "scaffold", "fedhbm"]]


def test_rows_of_older_code_are_marked_in_the_evidence() -> None:
    rows = [row("fedcm", 0.5), {**row("ghbm", 0.6), "older": True}]
    assert claim(ladder(part("a", rows)), "1a").lines()[0][1] == "ghbm ‡ / fedcm"


def test_effects_are_points_or_ratios() -> None:
    difference = mean_difference([0.01, 0.02, 0.03])
    assert effect_text(difference, "points") == "+2.0 (-0.5 to +4.5)"
    assert effect_text(mean_difference([log(2), log(2)]), "ratio") == "× 0.50 (0.50 to 0.50)"
    assert effect_text(mean_difference([log(2)]), "ratio") == "× 0.50"


def ladder_result() -> dict[str, Any]:
    first = part("a", methods(fedavg=0.5, scaffold=0.6, fedacg=0.7, fedhbm=0.8))
    noisy = row("fedhbm", 0.9) | {"accuracy_seeds": [0.7, 0.5, 0.9, 0.6, 0.8], "accuracy_mean": 0.7}
    second = part("b", [*methods(fedavg=0.5, scaffold=0.6, fedacg=0.71), noisy])
    third = part("c", [row("fedavg", 0.5), row("scaffold", None), row("fedhbm", 0.6)])  # not ranked
    return ladder(first, second, third)["ladder"]


def test_the_ladder_table_marks_the_best_and_what_is_level_with_it() -> None:
    [sheet] = make_view(ladder_result()).sheets
    assert sheet.columns == ["method", "a", "b", "c", "mean rank (2 tasks)"]
    names = [cells[0] for cells in sheet.rows]
    marks = {(names[line], column): place for (line, column), place in sheet.places.items()}
    assert marks == {("fedhbm", 1): 1, ("fedacg", 2): 1, ("fedhbm", 2): 2, ("fedhbm", 3): 1}
    ranks = {cells[0]: cells[-1] for cells in sheet.rows}
    assert ranks == {"fedavg": "4.0", "scaffold": "3.0", "fedacg": "1.5", "fedhbm": "1.5"}
    assert sheet.rows[names.index("scaffold")][3] == "not run"


def test_of_equally_many_results_more_tasks_are_ranked() -> None:
    """Four methods on three tasks and three methods on four tasks are twelve results each."""
    four = [part(name, methods(fedavg=0.5, fedcm=0.6, fedacg=0.7, fedhbm=0.8)) for name in ("a", "b", "c")]
    three = part("d", methods(fedavg=0.5, fedcm=0.4, fedhbm=0.6))
    [sheet] = make_view(ladder(*four, three)["ladder"]).sheets
    assert sheet.columns[-1] == "mean rank (4 tasks)"
    assert {cells[0]: cells[-1] for cells in sheet.rows} == {
        "fedavg": "2.8",
        "fedcm": "2.2",
        "fedacg": "-",
        "fedhbm": "1.0",
    }


def test_the_ladder_figure_has_ranks_and_differences() -> None:
    figure = make_view(ladder_result()).figure
    assert figure is not None
    ranks, fedavg, momentum = figure["concat"]
    points = {point["method"]: point["x"] for point in ranks["data"]["values"] if "x" in point}
    assert points == {"fedavg": 4.0, "scaffold": 3.0, "fedacg": 1.5, "fedhbm": 1.5}
    joined = [point["method"] for point in ranks["data"]["values"] if "bar" in point]
    assert joined == ["fedacg", "fedhbm", "scaffold", "fedavg"], "two tasks separate nothing"
    means = {(point["task"], point["method"]): point["mean"] for point in fedavg["data"]["values"]}
    assert means["a", "fedhbm"] == pytest.approx(30, abs=0.2)
    assert ("c", "scaffold") not in means
    assert {point["method"] for point in momentum["data"]["values"]} == {"scaffold", "fedhbm"}
    assert all("low" in point for point in momentum["data"]["values"])


def test_a_diverged_method_is_ranked_last() -> None:
    result = ladder_result()
    for each in result["parts"][:2]:
        each["rows"][1] |= {"accuracy_mean": None, "accuracy_seeds": None, "status": "diverged"}
    [sheet] = make_view(result).sheets
    assert {cells[0]: cells[-1] for cells in sheet.rows}["scaffold"] == "4.0"


def test_control_variates_and_a_long_lookahead_count_as_rivals_only_in_the_second_claim() -> None:
    long_lookahead = {**row("fedacg", 0.9), "method": "fedacg algorithm.lookahead=full"}
    rows = [*methods(ghbm=0.8, fedcm=0.6, fedacg=0.7), long_lookahead]
    assert [claim(ladder(part("a", rows)), number).verdict for number in ("1a", "1b")] == ["supported", "not supported"]


def test_the_ladder_shows_rounds_bytes_and_transfer_time_until_the_target_relative_to_fedavg() -> None:
    rows = [row("FedAvg", 0.7, reached=80), row("ghbm", 0.8, reached=40), row("scaffold", 0.8, reached=60)]
    rows[0]["algorithm"] = "fedavg"
    rows[2]["rounds_to_target_seeds"] = [None] * 5  # counts with all 100 rounds
    iid = part("c", rows, data__partition="iid")
    other = [row("FedAvg", 0.7, reached=80) | {"algorithm": "fedavg"}, row("ghbm", 0.8, reached=20), rows[2]]
    tasks, costs = relative_costs(ladder(part("a", rows), part("b", other), iid)["ladder"])
    assert [task.title for task in tasks] == ["a", "b"]
    ratios = [(reached + seed) / (80 + seed) for reached in (40, 20) for seed in range(5)]
    ghbm = exp(sum(map(log, ratios)) / 10)
    scaffold = exp(sum(log(100 / (80 + seed)) for seed in range(5)) / 5)
    means = {each.label: (each.rounds.mean, each.bytes.mean, each.seconds.mean) for each in costs}
    assert means["ghbm"] == pytest.approx((ghbm, 1.5 * ghbm, 7 / 6 * ghbm))  # down 2 at 50 Mbit/s, up 1 at 10
    assert means["scaffold"] == pytest.approx((scaffold, 2 * scaffold, 2 * scaffold))
    assert [(each.reached, each.runs) for each in costs] == [(10, 10), (10, 10), (0, 10)]
    [_, sheet] = make_view(ladder(part("a", rows), part("b", other), iid)["ladder"]).sheets
    assert [line[4] for line in sheet.rows] == ["10 of 10", "10 of 10", "0 of 10"]
