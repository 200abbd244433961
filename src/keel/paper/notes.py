"""The lines beneath a table or figure: what was run, how hyper-parameters were chosen, and what is missing."""

from keel.paper.panels import MAXIMUM_CURVES, shows_curves
from keel.paper.results import Result, Row
from keel.paper.sheets import is_timed

COST_NOTE = (
    "Cost until the accuracy first reaches FedAvg's final accuracy: the rounds until then as a share of all rounds, "
    "and their bytes and wall-clock time. Relative cost: bytes of a round relative to FedAvg's. Δ: less (↓) or more "
    "(↑) than FedAvg spends until it first reaches that accuracy itself; the paper charges FedAvg for all its rounds, "
    "which makes its savings larger. A method that never reaches the target counts with all its rounds."
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
    lines += [_part_note(result, part) for part in result["parts"]]
    if any(row.get("guessed") for part in result["parts"] for row in part["rows"]):
        lines.append(
            "† The paper does not give all hyper-parameters of this method; docs/paper.md lists Keel's choices."
        )
    missing = sum(row["wanted"] - row["runs"] for part in result["parts"] for row in part["rows"])
    if missing:
        lines.append(f"{missing} run{'s' * (missing > 1)} missing: {result['command']}{options}")
    return lines


def _part_note(result: Result, part: Row) -> str:
    started = [row for row in part["rows"] if row["runs"]]
    line = f"{part['title']}: {_protocol(result, part)}. {part['tuned']}"
    if not started:
        return f"{line} Not run yet."
    edges = [f"{row['label']} ({', '.join(fields)})" for row in started if (fields := _edges(row))]
    if edges:
        line += f" At the edge of the grid, so that values outside it may be better: {'; '.join(edges)}."
    unsearched = [row["label"] for row in started if part["grid"] and "chosen" not in row]
    if unsearched:
        line += f" Not searched yet, shown with default hyper-parameters: {', '.join(unsearched)}."
    if shows_curves(result) and sum("curve" in row for row in part["rows"]) > MAXIMUM_CURVES:
        line += f" The figure shows FedAvg and the {MAXIMUM_CURVES - 1} best of the other methods."
    if result["view"] == "cost" and not is_timed(part):
        line += " Wall-clock times are omitted: they would measure the load of the machine."
    return line


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
    """Return the chosen hyper-parameters that are the smallest or largest value of their grid."""
    return [f"{field.rpartition('.')[2]} {row['chosen'][field]:g}" for field in row.get("at_the_edge", [])]
