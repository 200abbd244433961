"""The claims of the paper as questions to the stored results."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Any

from keel.paper.evidence import Claim, Contrast, Question, contrast, effect_text, p_text
from keel.paper.results import Result, Row, cited, fields_of, seed_values
from keel.report.significance import LEVEL, holm

FAMILY = ("ghbm", "localghbm", "fedhbm")
CLASSICAL = ("fedavgm", "fedacg", "scaffold_m", "fedcm", "fedadc", "mimemom", "mimelitemom")
"""The other methods that the paper lists as momentum-based."""
LONG_LOOKAHEAD = "fedacg algorithm.lookahead=full"
"""FedACG whose lookahead is 1/eta times Nesterov's; its authors have no server learning rate eta."""
KEELS = ("ghbm_theory", "ghbm_lookahead", "centralized")
"""Not competitors of the paper: the version of its proof, Keel's additions, and the reference."""
TASKS = ("ladder", "controlled-cifar10", "controlled")
"""The results with the tasks of the claims. Of parts with the same task the first counts."""
MARGIN = 0.005
"""A method counts as no worse if it loses less than this accuracy."""
IID_ALPHA = 1000.0
LARGE_CLIENTS, LOW_RATE = 500, 0.02

THEOREM = "Theorem: under cyclic participation, GHBM's rate does not depend on the heterogeneity G"
INDEPENDENT = 2.0
"""The factor by which a larger G may change the mean square of the gradient."""
THEOREM_RULE = (
    "The theorem is checked on a problem without noise: at the largest T, (1/T) sum |grad f|^2 of GHBM for a larger G "
    f"must be at most {INDEPENDENT:g} times that for the smallest G, in all client orders. In brackets: the range over "
    "orders."
)

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Task:
    """The finished rows of a part."""

    title: str
    source: str
    part: Row
    rows: list[Row]

    @property
    def fields(self) -> dict[str, Any]:
        return fields_of(self.part, self.rows[0])

    def of(self, *algorithms: str) -> list[Row]:
        return [row for row in self.rows if row["algorithm"] in algorithms]

    @property
    def classical(self) -> list[Row]:
        """The methods with the momentum of the last cohorts, without other corrections."""
        other = ("scaffold_m", LONG_LOOKAHEAD)
        return [row for row in self.of(*CLASSICAL) if row["method"] not in other]

    @property
    def others(self) -> list[Row]:
        """The competitors of the GHBM family."""
        return [row for row in self.rows if row["algorithm"] not in (*FAMILY, *KEELS)]


def find_tasks(results: Results, names: Iterable[str] = TASKS) -> list[Task]:
    """Return the tasks of these results that have a finished method, each once."""
    tasks: dict[str, Task] = {}
    for name in names:
        for part in results.get(name, {}).get("parts", []):
            rows = [{**row, "label": cited(row)} for row in part["rows"] if row.get("accuracy_mean") is not None]
            if rows:
                task = Task(part["title"], name, part, rows)
                key = {k: v for k, v in task.fields.items() if k.startswith(("data.", "model.", "participation."))}
                tasks.setdefault(repr((sorted(key.items()), part["rounds"])), task)
    return list(tasks.values())


def is_iid(task: Task) -> bool:
    return task.fields.get("data.partition") == "iid" or task.fields.get("data.alpha", 0.0) >= IID_ALPHA


def is_one_class(task: Task) -> bool:
    """Return whether each client has examples of one class."""
    return task.fields.get("data.partition") == "dirichlet" and task.fields.get("data.alpha") == 0.0


def is_large(task: Task) -> bool:
    """Return whether many clients, or natural ones, take part rarely."""
    many = task.fields.get("data.partition") == "key" or task.fields.get("data.clients", 0) >= LARGE_CLIENTS
    return many and task.fields["participation.rate"] <= LOW_RATE and not is_iid(task)


def all_claims(results: Results) -> list[Claim]:
    """Return the claims of the paper, in its order, with their evidence."""
    return [
        *_momentum(results),
        *_best_tau(results),
        *_bytes(results),
        _iid(results),
        _deviation(results),
        _large_scale(results),
    ]


def _momentum(results: Results) -> list[Claim]:
    tasks = [task for task in find_tasks(results) if is_one_class(task)]
    where = "each as tuned, on the tasks with one class per client. Differences in points of accuracy."
    return [
        Claim(
            "1a. At alpha = 0, the GHBM family is more accurate than classical momentum",
            f"GHBM, LocalGHBM and FedHBM against FedAvgM, FedACG, FedCM, FedADC, MimeMom and MimeLiteMom, {where}",
            _questions(tasks, lambda task: (task.of(*FAMILY), task.classical)),
            _sources(tasks),
        ),
        Claim(
            "1b. At alpha = 0, the GHBM family is more accurate than every other momentum method",
            "The same with two more rivals: SCAFFOLD-M, which adds control variates, and FedACG with a lookahead "
            f"longer than its momentum step, which its authors do not have; {where}",
            _questions(tasks, lambda task: (task.of(*FAMILY), task.of(*CLASSICAL))),
            _sources(tasks),
        ),
    ]


def _best_tau(results: Results) -> list[Claim]:
    first, best = list[Question](), list[Question]()
    for name in ("tau", "tau-participation"):
        for part in results.get(name, {}).get("parts", []):
            for period, title, rows in _sweeps(part):
                if period not in rows:
                    continue
                others = [row for tau, row in rows.items() if tau != period]
                if contrasts := [each for row in others if (each := _contrast(rows[period], row, MARGIN))]:
                    best.append(Question(title, [contrasts]))
                if period > 1 and 1 in rows and (each := _contrast(rows[period], rows[1])):
                    first.append(Question(title, [[each]]))
    sources = [name for name in ("tau", "tau-participation") if name in results]
    return [
        Claim(
            "2a. GHBM is more accurate at tau = 1/C than at tau = 1",
            "GHBM at tau = 1/C against GHBM at tau = 1, which is classical momentum. Differences in points of "
            "accuracy.",
            first,
            sources,
        ),
        Claim(
            "2b. No tau is better than 1/C",
            "GHBM at tau = 1/C against GHBM at every other tau that was run. A task is for the claim if the test "
            f"excludes that tau = 1/C loses {100 * MARGIN:g} points against one of them.",
            best,
            sources,
        ),
    ]


def _sweeps(part: Row) -> Iterator[tuple[int, str, dict[int, Row]]]:
    """Yield 1/C, a title and GHBM's rows by tau for each participation rate and sampler of a part."""
    groups: dict[tuple[float, str], dict[int, Row]] = {}
    for row in part["rows"]:
        if row.get("accuracy_mean") is not None and row["algorithm"] == "ghbm":
            fields = fields_of(part, row)
            rate, tau = fields["participation.rate"], fields["algorithm.tau"]
            tau = round(1 / rate) if tau == "period" else tau
            groups.setdefault((rate, fields["participation.sampler"]), {})[tau] = row
    for (rate, sampler), rows in groups.items():
        title = part["title"] + (f", C = {100 * rate:g} %" if len({rate for rate, _ in groups}) > 1 else "")
        cyclic = f", {sampler}" if len({sampler for _, sampler in groups}) > 1 else ""
        labelled = {tau: {**row, "label": cited({**row, "label": f"tau = {tau}"})} for tau, row in rows.items()}
        yield round(1 / rate), title + cyclic, labelled


def _bytes(results: Results) -> list[Claim]:
    tasks = [task for task in find_tasks(results) if not is_iid(task)]
    rule = (
        "Bytes until FedAvg's final accuracy, by seed; a seed that never reaches it counts with all its rounds. Ratios."
    )
    return [
        Claim(
            "3a. FedHBM reaches FedAvg's accuracy with fewer bytes than FedAvg",
            f"FedHBM against FedAvg on the non-IID tasks. {rule}",
            _questions(tasks, lambda task: (task.of("fedhbm"), task.of("fedavg")), log_bytes),
            _sources(tasks),
            "ratio",
        ),
        Claim(
            "3b. FedHBM reaches FedAvg's accuracy with the fewest bytes",
            f"FedHBM against every method outside the GHBM family on the non-IID tasks. {rule}",
            _questions(tasks, lambda task: (task.of("fedhbm"), task.others), log_bytes),
            _sources(tasks),
            "ratio",
        ),
    ]


def log_bytes(part: Row, row: Row) -> dict[int, float]:
    """Return the negative logarithm of the bytes until the target by seed: more is better, as for accuracy."""
    rounds = log_rounds(part, row)
    per_round = row["cost"]["bytes"] / row["cost"]["share"] / part["rounds"] if rounds else 1.0
    return {seed: value - log(per_round) for seed, value in rounds.items()}


def log_rounds(part: Row, row: Row) -> dict[int, float]:
    """Return the negative logarithm of the rounds until the target by seed."""
    if not row.get("cost") or row.get("rounds_to_target_seeds") is None:
        return {}
    rounds = [reached or part["rounds"] for reached in row["rounds_to_target_seeds"]]
    return {seed: -log(spent) for seed, spent in zip(seed_values(row), rounds, strict=True)}


def _iid(results: Results) -> Claim:
    tasks = [task for task in find_tasks(results) if is_iid(task)]
    questions = [
        Question(f"{task.title}: {row['label']}", [[each]])
        for task in tasks
        for row in task.of(*FAMILY)
        for baseline in task.of("fedavg")
        if (each := _contrast(row, baseline, MARGIN)) is not None
    ]
    return Claim(
        "4. On IID data, the GHBM family is not worse than FedAvg",
        "Each of GHBM, LocalGHBM and FedHBM against FedAvg. A task is for the claim if the test excludes that the "
        f"method loses {100 * MARGIN:g} points.",
        questions,
        _sources(tasks),
    )


def _deviation(results: Results) -> Claim:
    questions = []
    for part in results.get("deviation", {}).get("parts", []):
        for row in part["rows"]:
            fields = fields_of(part, row)
            series = {
                int(tau): {seed: -log(value) for seed, value in enumerate(each["second_half_seeds"])}
                for tau, each in row.get("deviation", {}).items()
                if each.get("second_half_seeds")
            }
            period = round(1 / fields["participation.rate"])
            taus = [tau for tau in sorted(series) if tau <= period]
            steps = [
                each
                for smaller, larger in pairwise(taus)
                if (each := contrast(f"tau = {larger}", f"tau = {smaller}", series[larger], series[smaller]))
            ]
            if steps:
                ends = contrast(f"tau = {taus[-1]}", f"tau = {taus[0]}", series[taus[-1]], series[taus[0]])
                questions.append(Question(part["title"], [steps], ends))
    return Claim(
        "5. The deviation from the gradient of all clients falls with tau, up to 1/C",
        "The deviation in the second half of the rounds at each tau that was measured against the next smaller one. "
        "Ratios; shown is the largest tau against the smallest.",
        questions,
        ["deviation"] if questions else [],
        "ratio",
    )


def _large_scale(results: Results) -> Claim:
    tasks = [task for task in find_tasks(results) if is_large(task)]
    return Claim(
        "6. The GHBM family is the most accurate at large scale",
        "GHBM, LocalGHBM and FedHBM against every other method on the tasks with natural clients or at least "
        f"{LARGE_CLIENTS} clients, of which at most {100 * LOW_RATE:g} % take part in a round. Differences in points "
        "of accuracy.",
        _questions(tasks, lambda task: (task.of(*FAMILY), task.others)),
        _sources(tasks),
    )


def theorem_summary(result: Result) -> list[str]:
    """Return the verdict on the theorem with its counts, the effect of the largest G, the values of G, and a dash.

    The records of the recipe `theorem` have the range over client orders of (1/T) sum |grad f|^2.
    """
    records = result.get("records", [])
    last = max((record["T"] for record in records), default=0)
    final = {(record["method"], record["G"]): record for record in records if record["T"] == last}
    values = sorted({G for _, G in final})
    if len(values) < 2:
        return ["**not run**", "-", "-", "-"]
    ghbm, fedcm = ([final[name, G] for G in values] for name in ("GHBM (theory)", "FedCM"))
    independent = sum(record["high"] <= INDEPENDENT * ghbm[0]["low"] for record in ghbm[1:])
    verdict = "supported" if independent == len(values) - 1 else "partly" if independent else "not supported"
    grows = " to ".join(
        f"{bound:.3g}" for bound in (ghbm[-1]["low"] / ghbm[0]["high"], ghbm[-1]["high"] / ghbm[0]["low"])
    )
    effect = f"GHBM × {ghbm[-1]['median'] / ghbm[0]['median']:.3g} ({grows}), "
    effect += f"FedCM × {fedcm[-1]['median'] / fedcm[0]['median']:.3g} from G = {values[0]:,} to {values[-1]:,}"
    return [f"**{verdict}**: {independent} of {len(values) - 1} G", effect, str(len(values)), "-"]


def better_methods(results: Results) -> list[list[str]]:
    """Return a line for each method and task where a method outside the family is above the family's best.

    The family's best member is selected by the reported seeds, which favours the family. The p values are corrected for
    the number of methods.
    """
    lines = []
    for task in find_tasks(results):
        family = max(task.of(*FAMILY), key=lambda row: row["accuracy_mean"], default=None)
        if family is None:
            continue
        others = [row for row in task.rows if row["algorithm"] not in FAMILY]
        found = [each for row in others if (each := _contrast(row, family)) is not None]
        for each, p in zip(found, holm([each.difference.p for each in found]), strict=True):
            if p < LEVEL and each.difference.mean > 0:
                effect = effect_text(each.difference, "points")
                lines.append([task.title, each.first, each.second, effect, p_text(p)])
    return lines


Values = Callable[[Row, Row], dict[int, float]]
"""The values of a row of a part, by seed."""


def _accuracy(part: Row, row: Row) -> dict[int, float]:
    return seed_values(row)


def _questions(
    tasks: list[Task], select: Callable[[Task], tuple[list[Row], list[Row]]], values: Values = _accuracy
) -> list[Question]:
    """Return a question for each task: the favoured rows against the others."""
    questions = []
    for task in tasks:
        favoured, others = select(task)
        if all("search_score" in row for row in favoured):  # a selection without the reported seeds
            favoured = sorted(favoured, key=lambda row: -row["search_score"])[:1]
        contrasts = [
            [
                each
                for other in others
                if (each := contrast(row["label"], other["label"], values(task.part, row), values(task.part, other)))
            ]
            for row in favoured
        ]
        if complete := [each for each in contrasts if each]:
            questions.append(Question(task.title, complete))
    return questions


def _contrast(row: Row, other: Row, margin: float = 0.0) -> Contrast | None:
    return contrast(row["label"], other["label"], seed_values(row), seed_values(other), margin)


def _sources(tasks: list[Task]) -> list[str]:
    return list(dict.fromkeys(task.source for task in tasks))
