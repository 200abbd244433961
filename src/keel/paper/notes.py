"""The lines beneath a table or figure: what was run, how hyper-parameters were chosen, and what is missing."""

from keel.paper.evidence import p_text
from keel.paper.ladder import rank_ladder
from keel.paper.ladder_cost import NETWORK, relative_costs
from keel.paper.panels import MAXIMUM_CURVES, shows_curves
from keel.paper.results import OLDER_MARK, Result, Row
from keel.paper.sheets import is_timed

COST_NOTE = (
    "Cost until the accuracy first reaches FedAvg's final accuracy: the rounds until then as a share of all rounds, "
    "and their bytes and wall-clock time. Relative cost: bytes of a round relative to FedAvg's. Δ: less (↓) or more "
    "(↑) than FedAvg spends until it first reaches that accuracy itself; the paper charges FedAvg for all its rounds, "
    "which makes its savings larger. A method that never reaches the target counts with all its rounds."
)
LADDER_NOTE = (
    "Bold: the best method of a task. Underlined: methods whose paired difference from it over seeds is not "
    "significant (t test, p corrected by Holm's procedure for the number of methods)."
)
LADDER_COST_NOTE = (
    "Cost until the accuracy first reaches FedAvg's final accuracy, relative to FedAvg with the same seed: geometric "
    "mean over seeds and tasks (95 % interval over seeds, for these tasks). A run that never reaches it counts with "
    "all its rounds. Modelled transfer time: the messages at {up:g} Mbit/s up and {down:g} Mbit/s down, without "
    "latency and computation."
)
SMOKE_NOTE = "Smoke scale only checks that the recipe runs; its numbers mean nothing."


def finding(result: Result) -> list[str]:
    """Return the paper's conclusion, if the recipe quotes it."""
    return [f"The paper: {result['finds']}"] if result["finds"] else []


def make_notes(result: Result, options: str) -> list[str]:
    """Return the notes of a result; `options` are those of the command that finds its runs."""
    lines = finding(result)
    if result["scale"] == "smoke":
        lines.append(SMOKE_NOTE)
    if result["view"] == "cost":
        lines.append(COST_NOTE)
    if result["view"] == "ladder":
        lines += [LADDER_NOTE, *_rank_note(result), *_cost_note(result)]
    started = [part for part in result["parts"] if any(row["runs"] for row in part["rows"])]
    lines += [*(_part_note(result, part) for part in started), *_tuning_notes(started)]
    if waiting := [part["title"] for part in result["parts"] if part not in started]:
        lines.append(f"Not run yet: {'; '.join(waiting)}.")
    if any(row.get("guessed") for part in result["parts"] for row in part["rows"]):
        lines.append(
            "† The paper does not give all hyper-parameters of this method; docs/paper.md lists Keel's choices."
        )
    if any(row.get("older") for part in result["parts"] for row in part["rows"]):
        lines.append(f"{OLDER_MARK} Measured by an older version of the code, which computed something else.")
    missing = sum(row["wanted"] - row["runs"] for part in result["parts"] for row in part["rows"])
    if missing:
        lines.append(f"{missing} run{'s' * (missing > 1)} missing: {result['command']}{options}")
    return lines


def _part_note(result: Result, part: Row) -> str:
    started = [row for row in part["rows"] if row["runs"]]
    line = f"{part['title']}: {_protocol(result, part)}."
    edges = [f"{row['label']} ({', '.join(fields)})" for row in started if (fields := _edges(row))]
    if edges:
        line += " The search ended at the border of what it tried, so that other values may be better: "
        line += f"{'; '.join(edges)}."
    unsearched = [row["label"] for row in started if part.get("trials") and "chosen" not in row]
    if unsearched:
        line += f" Not searched yet, shown with default hyper-parameters: {', '.join(unsearched)}."
    if shows_curves(result) and sum("curve" in row for row in part["rows"]) > MAXIMUM_CURVES:
        line += f" The figure shows FedAvg and the {MAXIMUM_CURVES - 1} best of the other methods."
    if result["view"] == "cost" and not is_timed(part):
        line += " Wall-clock times are omitted: they would measure the load of the machine."
    return line


def _tuning_notes(parts: list[Row]) -> list[str]:
    """Return how hyper-parameters were chosen, once for all parts of which it is true."""
    titles: dict[str, list[str]] = {}
    for part in parts:
        titles.setdefault(part["tuned"], []).append(part["title"])
    if len(titles) == 1:
        return list(titles)
    return [f"{'; '.join(names)}: {text}" for text, names in titles.items()]


def _protocol(result: Result, part: Row) -> str:
    """Return the rounds, the seeds and the rounds over which accuracy is averaged."""
    centralized = all(row["method"] == "centralized" for row in part["rows"])
    rounds, last = part["rounds"], part["spec"].get("evaluation.last")
    text = f"{rounds:,} {'epochs' if centralized else 'rounds'}"
    if result["view"] != "deviation" and last is not None:
        text += f", accuracy averaged over the last {min(last, rounds)}"
    text += f", {part['seeds']} seed{'s' * (part['seeds'] > 1)}"
    return text + (" (± standard deviation)" if part["seeds"] > 1 and result["view"] != "deviation" else "")


def _edges(row: Row) -> list[str]:
    """Return the chosen hyper-parameters of which the search did not try both a smaller and a larger value."""
    return [f"{field.rpartition('.')[2]} {row['chosen'][field]:g}" for field in row.get("open_fields", [])]


def _cost_note(result: Result) -> list[str]:
    tasks, _ = relative_costs(result)
    if not tasks:
        return []
    text = LADDER_COST_NOTE.format(up=NETWORK.up_mbps, down=NETWORK.down_mbps)
    return [f"{text} Tasks: {'; '.join(task.title for task in tasks)}."]


def _rank_note(result: Result) -> list[str]:
    ranking = rank_ladder(result)
    if ranking is None:
        return []
    text = f"Ranks: means over the {ranking.tasks} tasks with all {len(ranking.ranks)} methods, 1 is the best. "
    p = p_text(ranking.p)
    text += f"Friedman's test in Iman and Davenport's form: p {p if p.startswith('<') else '= ' + p}. "
    text += f"Mean ranks that differ by less than {ranking.critical_difference:.1f}, Nemenyi's critical difference at "
    return [text + "5 %, are not separated; bars in the figure join them."]
