"""keel campaign: run the paper's experiments in order of their value, within a time budget."""

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.options import AsJson, Quiet, print_json
from keel.cli.paper import DEFAULT_OUT, Out, Scale


def campaign(
    names: Annotated[list[str] | None, typer.Argument(help="Names from keel paper list; by default all.")] = None,
    hours: Annotated[float, typer.Option(min=0, help="No run is started after this time.")] = 1.0,
    scale: Annotated[Scale, typer.Option(help="As in keel paper run.")] = Scale.desktop,
    out: Out = DEFAULT_OUT,
    results: Annotated[
        Path | None, typer.Option(help="Results of earlier campaigns (results/paper); their runs are not made again.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments for some hours. Those that say most about its claims come first.

    Runs that have finished are not repeated, and interrupted ones are resumed, so that a campaign of days can be split
    into sessions. Render the results with keel paper run NAME --as-is. Example: keel campaign --hours 8
    """
    from keel.cli.terminal import console, errors
    from keel.paper.campaign import next_steps, plan_campaign, run_campaign
    from keel.paper.recipes import check_scale, find_recipe
    from keel.paper.reported import Reported
    from keel.runs.resources import check_output_folder

    for name in names or []:
        check_scale(find_recipe(name), scale.value)
    check_output_folder(out)
    reported = None if results is None else Reported(results)
    steps = plan_campaign(out, scale.value, names or [], reported)

    def report(line: str) -> None:
        if not quiet:
            errors.print(line, soft_wrap=True)

    if not dry_run:
        steps = run_campaign(steps, out, hours, quiet, report, reported)
    if as_json:
        print_json([step.as_dict() for step in steps])
        return
    for step in steps:
        console.print(step.describe(), soft_wrap=True)
    following = next(next_steps(steps), None)
    last = "Everything has finished." if following is None else f"Next: {following.describe()}"
    console.print(f"\n{last}", soft_wrap=True)
