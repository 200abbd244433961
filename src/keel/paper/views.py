"""A result as people read it: sheets, charts and the lines beneath. Computes nothing anew and reads no run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from keel.paper.recipes import printed_title
from keel.paper.results import Result, Row
from keel.reporting import charts
from keel.reporting.tables import Places, Sheet, change, csv_of, latex, latex_note, markdown, text_of
from keel.reporting.tables import accuracy as accuracy_of
from keel.runs.folder import write_whole
from keel.units import duration, size

WIDTH = 380
"""Of a panel."""
THEIRS = ("paper: bytes", "paper: time")
"""Columns of the table of costs."""
COSTS = (
    "Until FedAvg's final accuracy, by the paper's three steps: the rounds until then as a share of all, and the bytes "
    "and time of as many. A round: its bytes against FedAvg's. FedAvg pays for all its rounds, as in the paper, even "
    "if it is there before the last; so does who never gets there."
)
SMOKE = "A check that it works: the numbers of runs this short mean nothing."
SHOWN = 10
"""Curves of a panel at the most; then those of the best methods and of FedAvg."""


@dataclass(frozen=True)
class View:
    """A result's sheets, the lines that explain them, and the figure as Vega-Lite."""

    sheets: list[Sheet]
    notes: list[str]
    figure: dict[str, Any] | None = None
    records: list[Row] = field(default_factory=list)


def view(result: Result, options: str = "") -> View:
    """How a result is shown; `options` are those with which the command finds its runs."""
    if "columns" in result:
        return _plain(result)
    sheets = SHEETS[result["view"]]({**result, "parts": _begun(result["parts"])})
    panels = PANELS[result["view"]](result) if result["view"] in PANELS else []
    figure = figure_of(panels, title_of(result)) if panels else None
    return View(sheets, _notes(result, options), figure, _records(result))


def title_of(result: Result) -> str:
    """A line above it."""
    return f"{result['number'] or 'Keel'}: {result['title']} ({result['scale']})"


def write(result: Result, shown: View, folder: Path) -> list[Path]:
    """The result and its renderings in a folder; their files."""
    title = title_of(result)
    texts = {
        "result.json": json.dumps(result, indent=1, ensure_ascii=False) + "\n",
        "table.txt": "\n\n".join([title, *map(text_of, shown.sheets), *shown.notes]) + "\n",
        "table.md": "\n\n".join([f"# {title}", *map(markdown, shown.sheets), *shown.notes]) + "\n",
        "table.tex": "\n\n".join([f"% {title}", *map(latex, shown.sheets), *map(latex_note, shown.notes)]) + "\n",
        "table.csv": csv_of(shown.records),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    if shown.figure is not None:
        contents |= drawn(shown.figure, shown.notes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_whole(folder / name, [content])
    return [folder / name for name in contents]


def drawn(figure: dict[str, Any], notes: Sequence[str] = ()) -> dict[str, bytes]:
    """A figure as HTML that opens offline with what explains it, SVG and PNG."""
    version = charts.VEGA_LITE
    page = vl_convert.vegalite_to_html(figure, vl_version=version, bundle=True)
    beneath = "".join(f"<p>{escape(note)}</p>" for note in notes)
    page = page.replace("<title>Chart</title>", f"<title>{escape(figure['title']['text'])}</title>")
    page = page.replace("</body>", f'<div style="font: 14px sans-serif; max-width: 60em">{beneath}</div></body>')
    return {
        "figure.html": page.encode(),
        "figure.svg": vl_convert.vegalite_to_svg(figure, vl_version=version).encode(),
        "figure.png": vl_convert.vegalite_to_png(figure, vl_version=version, scale=2),
    }


def _plain(result: Result) -> View:
    """One whose sheet came ready, without runs."""
    columns, rows = result["columns"], result["rows"]
    sheet = Sheet("", columns, rows, {})
    figure = figure_of(result["panels"], title_of(result)) if "panels" in result else None
    records = result.get("records") or [dict(zip(columns, row, strict=True)) for row in rows]
    smoke = [SMOKE] if result["scale"] == "smoke" and "records" in result else []
    return View([sheet], [*_finds(result), *smoke, *result.get("notes", [])], figure, records)


def _accuracy(result: Result) -> list[Sheet]:
    """Methods by parts, ours and the paper's side by side; a row for each part where there is one method alone."""
    parts = result["parts"]
    labels = list(dict.fromkeys(row["label"] for part in parts for row in part["rows"]))
    if len(labels) == 1:
        first = [(part["title"], part["rows"][0]) for part in parts]
        rows = [[_name({**row, "label": title}), _ours(row), _theirs(row)] for title, row in first]
        return [Sheet("", [labels[0], "ours", "paper"], rows, {})]
    columns = ["method"]
    places: Places = {}
    cells: dict[str, list[str]] = {label: [label] for label in labels}
    for part in parts:
        known = {row["label"]: row for row in part["rows"]}
        beside = any(row["printed"] for row in part["rows"])
        columns += [part["title"], *([_paper(part)] if beside else [])]
        ranks = _ranks(list(known.values()))
        for number, label in enumerate(labels):
            row = known.get(label)
            if row is not None and label in ranks:
                places[number, len(cells[label])] = ranks[label]
            mark = " †" if row is not None and row.get("guessed") else ""
            cells[label] += [_ours(row) + mark, *([_theirs(row)] if beside else [])]
    return [Sheet("", columns, list(cells.values()), places)]


def _cost(result: Result) -> list[Sheet]:
    """A sheet for each part: bytes and time until FedAvg's quality, with the paper's beside."""
    sheets = []
    for part in result["parts"]:
        beside, timed = any(row["printed_cost"] for row in part["rows"]), _timed(part)
        columns = ["method", "a round", "share of rounds", "bytes", "Δ bytes", *(["paper: bytes"] if beside else [])]
        columns += [*(["time", "Δ time"] if timed else []), *(["paper: time"] if beside else [])]
        rows = []
        for row in part["rows"]:
            known = {"method": _name(row), **dict(zip(THEIRS, row["printed_cost"] or ("-", "-"), strict=True))}
            if (cost := row.get("cost")) is not None:
                never = row["rounds_to_target"] is None and row["algorithm"] != "fedavg"
                known |= {
                    "a round": _overhead(part, row),
                    "share of rounds": "never" if never else f"{cost['share']:.2f}",
                }
                known |= {"bytes": size(cost["bytes"]), "Δ bytes": change(cost["bytes_saved"])}
                known |= {"time": duration(cost["seconds"]), "Δ time": change(cost["seconds_saved"])} if timed else {}
            rows.append([known.get(column, "-") for column in columns])
        title = part["title"] + (f" ({_paper(part)})" if beside and _paper(part) != "paper" else "")
        sheets.append(Sheet(title, columns, rows, _cheapest(part["rows"], columns)))
    return sheets


def _overhead(part: Row, row: Row) -> str:
    """A round's bytes as a multiple of FedAvg's."""
    base = next((each["cost"] for each in part["rows"] if each.get("cost") and each["algorithm"] == "fedavg"), None)
    if base is None:
        return "-"
    return f"{row['cost']['bytes'] / row['cost']['share'] / base['bytes']:.2g}x"


def _timed(part: Row) -> bool:
    """Whether a part's times say something: those of runs of less than a minute do not, and some are not kept."""
    costs = [row["cost"] for row in part["rows"] if row.get("cost")]
    return all(cost["seconds"] is not None and cost["seconds"] / cost["share"] >= 60 for cost in costs)


def _against(result: Result) -> list[Sheet]:
    """Methods by the values on the x-axis where those are a field of all; else the table of accuracies."""
    if not any(row["values"] for part in result["parts"] for row in part["rows"]):
        return _accuracy(result)
    sheets = []
    for part in result["parts"]:
        values = list(dict.fromkeys(_value(result, row) for row in part["rows"]))
        labels = list(dict.fromkeys(row["label"] for row in part["rows"]))
        known = {(row["label"], _value(result, row)): row for row in part["rows"]}
        columns = [result["against"].rpartition(".")[2], *values]
        names = {row["label"]: _name(row) for row in part["rows"]}
        rows = [[names[label], *(_ours(known.get((label, value))) for value in values)] for label in labels]
        places: Places = {}
        for column, value in enumerate(values, start=1):
            ranks = _ranks([row for row in part["rows"] if _value(result, row) == value])
            places |= {(labels.index(label), column): place for label, place in ranks.items()}
        sheets.append(Sheet(part["title"], columns, rows, places))
    return sheets


def _deviation(result: Result) -> list[Sheet]:
    parts = result["parts"]
    taus = list(dict.fromkeys(tau for part in parts for row in part["rows"] for tau in row.get("deviation", {})))
    rows = [
        [tau, *(_number(part["rows"][0].get("deviation", {}).get(tau, {}).get("second_half")) for part in parts)]
        for tau in taus
    ]
    return [Sheet("Mean over the second half of the rounds", ["tau", *(part["title"] for part in parts)], rows, {})]


SHEETS: dict[str, Callable[[Result], list[Sheet]]] = {
    "accuracy": _accuracy,
    "cost": _cost,
    "curves": _accuracy,
    "against": _against,
    "deviation": _deviation,
}

Panel = dict[str, Any]
"""A chart's form, title, labels and rows."""


def _curves(result: Result) -> list[Panel]:
    return [
        {
            "title": part["title"],
            "form": "accuracy",
            "labels": [row["label"] for row in shown],
            "rows": [point for row in shown for point in _points(row["label"], row["curve"])],
        }
        for part in result["parts"]
        if (shown := _few([row for row in part["rows"] if "curve" in row]))
    ]


def _over_values(result: Result) -> list[Panel]:
    """Final accuracy against a field; a method that has not the field is a level line."""
    panels = []
    for part in result["parts"]:
        finished = [row for row in part["rows"] if row.get("accuracy_mean") is not None]
        values = list(dict.fromkeys(v for row in part["rows"] if (v := _value(result, row)) is not None))
        rows = []
        for row in finished:
            at = _value(result, row)
            label = row["label"] if row["values"] or at is None else row["label"].split()[0]
            mean, spread = row["accuracy_mean"], row["accuracy_std"] or 0.0
            for value in values if at is None else [at]:
                band = {"low": max(0.0, mean - spread), "high": min(1.0, mean + spread)}
                rows.append({"method": label, "x": value, "mean": mean} | (band if at is not None else {}))
        if rows:
            labels = list(dict.fromkeys(row["method"] for row in rows))
            name = result["against"].rpartition(".")[2]
            form = {"form": "values", "values": values, "x": name}
            panels.append({"title": part["title"], **form, "labels": labels, "rows": rows})
    return panels


def _against_panels(result: Result) -> list[Panel]:
    over = any(row["values"] for part in result["parts"] for row in part["rows"])
    return _over_values(result) if over else [*_curves(result), *_over_values(result)]


def _deviation_panels(result: Result) -> list[Panel]:
    panels = []
    for part in result["parts"]:
        told = part["rows"][0].get("deviation", {})
        if told:
            rows = [point for tau, series in told.items() for point in _points(f"tau = {tau}", series)]
            labels = [f"tau = {tau}" for tau in told]
            panels.append({"title": part["title"], "form": "deviation", "labels": labels, "rows": rows})
    return panels


PANELS: dict[str, Callable[[Result], list[Panel]]] = {
    "curves": _curves,
    "against": _against_panels,
    "deviation": _deviation_panels,
}


def figure_of(panels: list[Panel], title: str) -> dict[str, Any]:
    """The panels side by side, two in a row, as one chart with its data inside."""
    fewest_first = sorted((panel.get("labels", []) for panel in panels), key=len)  # they get colours of their own
    labels = list(dict.fromkeys(label for some in fewest_first for label in some))
    drawn_panels = [_with_data(_chart(panel), panel, labels) for panel in panels]
    return {
        "$schema": alt.SCHEMA_URL,
        "title": {"text": title, "offset": 12},
        "concat": drawn_panels,
        "columns": 2,
        "resolve": {"scale": {"color": "independent", "strokeDash": "independent", "x": "independent"}},
        "config": charts.PAPER | {"legend": charts.PAPER["legend"] | {"columns": 3}},
    }


def _chart(panel: Panel) -> alt.Chart | alt.LayerChart:
    match panel["form"]:
        case "accuracy":
            return charts.lines(panel["labels"], charts.ROUNDS, charts.ACCURACY)
        case "deviation":
            return charts.lines(panel["labels"], charts.ROUNDS, charts.DEVIATION)
        case "losses":
            return charts.falling(panel["labels"], charts.ROUNDS, charts.ABOVE_LEAST)
        case "values":
            return charts.by_value(panel["labels"], panel["values"], panel["x"], charts.FINAL)
        case _:
            return charts.who_took_part()


def _with_data(chart: alt.Chart | alt.LayerChart, panel: Panel, labels: list[str]) -> dict[str, Any]:
    """The chart with its own rows, as one of several in a picture, in which a method looks the same everywhere."""
    looks: dict[str, list[Any]] = {"color": charts.colours(len(labels)), "strokeDash": charts.dashes(len(labels))}
    spec = chart.properties(width=WIDTH, height=260, title=panel["title"]).to_dict()
    for unwanted in ("$schema", "config", "datasets"):
        spec.pop(unwanted, None)
    for layer in spec.get("layer", []):
        layer.pop("data", None)
        for channel, look in looks.items():
            if channel in layer["encoding"]:
                scale = layer["encoding"][channel]["scale"]
                scale["range"] = [look[labels.index(label)] for label in scale["domain"]]
    return {**spec, "data": {"values": panel["rows"]}}


def _points(label: str, series: Row) -> list[Row]:
    columns = zip(series["rounds"], series["mean"], series["low"], series["high"], strict=True)
    return [{"method": label, "x": x, "mean": mean, "low": low, "high": high} for x, mean, low, high in columns]


def _few(rows: list[Row]) -> list[Row]:
    """Those that are drawn where there are too many: FedAvg and the best."""
    if len(rows) <= SHOWN:
        return rows
    best = sorted(rows, key=lambda row: (row["algorithm"] != "fedavg", -(row["accuracy_mean"] or 0.0)))[:SHOWN]
    return [row for row in rows if row in best]


def _value(result: Result, row: Row) -> str | None:
    """What the row has on the x-axis."""
    name = result["against"]
    if name in row["values"]:
        return f"{row['values'][name]:g}"
    own = dict(each.split("=") for each in row["method"].split()[1:])
    return own.get(name)


def _ours(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["runs"]:
        return "not run"
    short = f" ({row['runs']} of {row['wanted']} seeds)" if row["runs"] < row["wanted"] else ""
    return accuracy_of(row) + short


def _theirs(row: Row | None) -> str:
    theirs = None if row is None else row["printed"]
    if theirs is None:
        return "-"
    return theirs if theirs == "diverged" else f"{theirs} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ranks(rows: list[Row]) -> dict[str, int]:
    known = {row["label"]: row["accuracy_mean"] for row in rows if row.get("accuracy_mean") is not None}
    if len(known) < 2:
        return {}
    return {label: 1 + sum(other > value for other in known.values()) for label, value in known.items()}


def _cheapest(rows: list[Row], columns: list[str]) -> Places:
    """Places by bytes and, where the sheet has it, by time."""
    places: Places = {}
    for column, name in (("bytes", "bytes"), ("time", "seconds")):
        if column in columns:
            known = {number: row["cost"][name] for number, row in enumerate(rows) if row.get("cost")}
            at = columns.index(column)
            places |= {(n, at): 1 + sum(other < value for other in known.values()) for n, value in known.items()}
    return places


def _name(row: Row) -> str:
    """A row's label, marked where the paper leaves its hyper-parameters open."""
    return f"{row['label']} †" if row.get("guessed") else row["label"]


def _paper(part: Row) -> str:
    """The heading of the paper's numbers, with where they are from if that is not what the part is called."""
    title = printed_title(part["printed"])
    return "paper" if title == part["title"] else f"paper: {title}"


def _begun(parts: list[Row]) -> list[Row]:
    """Those that have a run; all of them where none has."""
    return [part for part in parts if any(row["runs"] for row in part["rows"])] or parts


def _finds(result: Result) -> list[str]:
    return [f"The paper: {result['finds']}"] if result["finds"] else []


def _notes(result: Result, options: str) -> list[str]:
    """What was run, in a line for each part, how its fields were chosen, and what is missing."""
    lines = _finds(result)
    if result["scale"] == "smoke":
        lines.append(SMOKE)
    if result["view"] == "cost":
        lines.append(COSTS)
    for part in result["parts"]:
        begun = [row for row in part["rows"] if row["runs"]]
        line = f"{part['title']}: {_protocol(result, part)}. {part['tuned']}"
        edges = [f"{row['label']} ({', '.join(fields)})" for row in begun if (fields := _edge(row))]
        if edges:
            line += f" Chosen at the edge of the grid, beyond which it may do better: {'; '.join(edges)}."
        guesses = [row["label"] for row in begun if part["grid"] and "chosen" not in row]
        if guesses:
            line += f" Not yet searched, and so shown at the defaults: {', '.join(guesses)}."
        if result["view"] in ("curves", "against") and len(begun) > SHOWN:
            line += f" Drawn are FedAvg and the best of the others, {SHOWN} in all."
        if result["view"] == "cost" and begun and not _timed(part):
            line += " Times are left out: they would tell how busy the machine was."
        lines.append(line if begun else f"{line} Not yet run.")
    if any(row.get("guessed") for part in result["parts"] for row in part["rows"]):
        lines.append("† The paper leaves some of its hyper-parameters open; docs/paper.md says what they are here.")
    missing = sum(row["wanted"] - row["runs"] for part in result["parts"] for row in part["rows"])
    if missing:
        lines.append(f"{missing} run{'s' * (missing > 1)} not there yet: {result['command']}{options}")
    return lines


def _protocol(result: Result, part: Row) -> str:
    """Rounds and seeds, and what an accuracy is the mean of."""
    centralized = all(row["method"] == "centralized" for row in part["rows"])
    rounds, last = part["rounds"], part["spec"].get("evaluation.last")
    words = f"{rounds:,} {'epochs' if centralized else 'rounds'}"
    if result["view"] != "deviation" and last is not None:
        words += f", accuracy over the last {min(last, rounds)}"
    words += f", {part['seeds']} seed{'s' * (part['seeds'] > 1)}"
    return words + (" (± their deviation)" if part["seeds"] > 1 and result["view"] != "deviation" else "")


def _edge(row: Row) -> list[str]:
    """Chosen fields that a search had at one end of its values."""
    return [f"{field.rpartition('.')[2]} {row['chosen'][field]:g}" for field in row.get("at_the_edge", [])]


def _records(result: Result) -> list[Row]:
    """A line for each row of each part: ours unrounded, the paper's as printed."""
    left_out = ("curve", "deviation", "settings", "chosen", "at_the_edge", "values", "printed", "printed_cost")
    records = []
    for part in result["parts"]:
        for row in part["rows"]:
            mean, _, deviation = (row["printed"] or "").partition(" ± ")
            bytes_, time = row["printed_cost"] or ("", "")
            own = {name: value for name, value in row.items() if name not in left_out}
            paper = {"paper_mean": mean, "paper_std": deviation, "paper_bytes": bytes_, "paper_time": time}
            whose = {"paper_setting": printed_title(part["printed"])} if part["printed"] else {}
            late = {f"deviation_tau_{tau}": told["second_half"] for tau, told in row.get("deviation", {}).items()}
            records.append({"part": part["title"], **row["values"], **own, **late, **paper, **whose})
    return records
