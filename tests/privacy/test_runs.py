"""Privacy and robust means in whole runs: what is refused, the account, equal bits, budgets, the report of a run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import keel
from keel.algorithms import REGISTRY, algorithm_class
from keel.cli.run import _report_end
from keel.cli.terminal import announce_footprint
from keel.config.defaults import completed, make_spec
from keel.errors import KeelError
from keel.privacy.clipping import joint_norm
from keel.report.comparison import compare
from keel.report.tables import privacy_losses
from keel.runs.build import build, make_task
from keel.runs.export import export
from keel.runs.finding import find_runs
from keel.runs.folder import RunFolder
from keel.runs.progress import ProgressObserver, show_progress
from keel.runs.run import resume

PRIVATE = {"clip": 0.5, "noise": 1.0, "delta": 1e-5}
BASE = {
    "rounds": 2,
    "data": {"clients": 20},
    "participation": {"rate": 0.2, "sampler": "poisson"},
    "local": {"steps": 2},
    "evaluation": {"every": 10, "last": 1},
    "engine": {"name": "serial"},
}
CYCLIC = {"participation": {"rate": 0.2, "sampler": "cyclic"}}
MECHANISMS: dict[str, dict[str, Any]] = {
    "central": {"privacy": PRIVATE},
    "adaptive": {"privacy": {**PRIVATE, "quantile": 0.5, "bit_noise": 2.0}},
    "local": {"privacy": {**PRIVATE, "mechanism": "local"}},
    "tree": {"privacy": {**PRIVATE, "mechanism": "tree"}, **CYCLIC},
    "example": {"privacy": {**PRIVATE, "mechanism": "example"}},
    "median": {"server": {"mean": "median"}},
    "trimmed_mean": {"server": {"mean": "trimmed_mean"}},
    "geometric_median": {"server": {"mean": "geometric_median"}},
}
REFUSED = {
    "pooled": {"centralized"},
    "first phase": {"mime", "mimemom"},
    "each report": {"fedcm", "ghbm_theory", "scaffold_m", "mofedsam"},
    "unclippable": {"fednova", "fedadamw"},
}


def refused(mechanism: str, algorithm: str) -> bool:
    groups = {"pooled", "first phase"}
    if mechanism in ("central", "adaptive", "tree"):
        groups |= {"each report", "unclippable"}
    elif mechanism == "local":
        groups |= {"unclippable"}
    elif mechanism != "example":
        groups |= {"each report"}
    elif algorithm == "mimelitemom":
        return True
    return any(algorithm in REFUSED[group] for group in groups)


@pytest.fixture(scope="module")
def task() -> Any:
    return make_task(make_spec({**BASE, "algorithm": {"name": "fedavg"}, "model": {"name": "mlp", "hidden": [4]}}))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_algorithm_runs_or_is_refused_with_a_reason(mechanism: str, task: Any) -> None:
    for name in REGISTRY:
        table = {**BASE, "algorithm": {"name": name}, "model": {"name": "mlp", "hidden": [4]}, **MECHANISMS[mechanism]}
        if refused(mechanism, name):
            with pytest.raises(KeelError, match=f"{name}[: ]|{name} pools"):
                make_spec(table)
            continue
        loop, records = build(make_spec(table), task).loop, []
        loop.run(loop.start(), [lambda record, state, seconds, records=records: records.append(record)])
        assert len(records) == 2, name
        assert not records[-1].get("diverged"), name
        if "privacy" in MECHANISMS[mechanism]:
            assert 0 < records[0]["epsilon"] <= records[1]["epsilon"]


def trained(engine: str, algorithm: str = "ghbm", **more: Any) -> torch.Tensor:
    spec = make_spec({**BASE, "algorithm": {"name": algorithm}, "engine": {"name": engine, "workers": 2}, **more})
    loop = build(spec, make_task(spec)).loop
    state = loop.start()
    loop.run(state)
    return state.server["theta"]


@pytest.mark.parametrize("mechanism", ["central", "adaptive", "local", "tree", "example", "geometric_median"])
def test_engines_have_equal_bits(mechanism: str) -> None:
    serial = trained("serial", **MECHANISMS[mechanism])
    assert torch.equal(serial, trained("pool", **MECHANISMS[mechanism]))
    if mechanism != "example":
        assert torch.allclose(serial, trained("cohort", **MECHANISMS[mechanism]), atol=1e-4)


TOGETHER: dict[str, dict[str, Any]] = {
    "scaffold": {**MECHANISMS["central"], "compression": {"up": "top_k", "fraction": 0.1}},
    "ghbm": {**MECHANISMS["local"], "compression": {"up": "int8", "down": "int4"}},
    "fedhbm": {**MECHANISMS["example"], "compression": {"up": "sign"}},
}


@pytest.mark.parametrize("algorithm", TOGETHER)
def test_privacy_and_compression_compose_with_equal_bits(algorithm: str) -> None:
    table = {**TOGETHER[algorithm], "rounds": 4}
    assert torch.equal(trained("serial", algorithm, **table), trained("pool", algorithm, **table))


def test_a_report_that_is_longer_after_decoding_is_clipped_again() -> None:
    """With error feedback a client may send more than the clipping norm: the mean bounds what is decoded."""
    table = {**TOGETHER["scaffold"], "privacy": {**PRIVATE, "noise": 0.0, "clip": 0.01}, "rounds": 5}
    spec = make_spec({**BASE, "algorithm": {"name": "fedavg"}, **table})
    loop, norms, models = build(spec, make_task(spec)).loop, list[float](), [torch.zeros(0)]

    class Watch(keel.Observer):
        def client_reported(self, client: int, weight: float, result: Any) -> None:
            norms.append(joint_norm(result.message))

        def round_recorded(self, record: Any, state: Any, seconds: float) -> None:
            models.append(state.server["theta"].clone())
            assert float((models[-1] - models[-2]).norm()) <= 0.01 * len(record["cohort"]) / 4 * 1.001

    models[0] = loop.initial.clone()
    loop.run(loop.start(), [Watch()])
    assert max(norms) > 0.01


def test_mechanisms_that_are_off_compute_nothing() -> None:
    spec = make_spec({**BASE, "algorithm": {"name": "fedavg"}})
    training = build(spec, make_task(spec))
    local = training.loop.local
    assert (training.privacy, training.loop.mean, local.gradients, local.downlink) == (None, None, None, None)
    assert not local.mechanisms
    records: list[Any] = []
    training.loop.run(training.loop.start(), [lambda record, *_: records.append(record)])
    assert not {"epsilon", "clip_norm", "dropped"} & records[0].keys()


@pytest.mark.parametrize("mechanism", ["adaptive", "tree"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(mechanism: str, tmp_path: Path) -> None:
    table = {**BASE, "rounds": 4, "algorithm": {"name": "fedavgm"}, **MECHANISMS[mechanism]}
    whole = keel.run(table, out=tmp_path / "whole")
    stopped: list[int] = []

    def interrupt(record: Any, state: Any, seconds: float) -> None:
        stopped.append(record["round"])
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keel.run(table, out=tmp_path / "parts", hooks=[interrupt])
    again = resume(tmp_path / "parts")
    assert again.summary["model_sha256"] == whole.summary["model_sha256"]
    assert again.summary["epsilon"] == whole.summary["epsilon"] == whole.records[-1]["epsilon"]


def test_noise_and_epsilon_are_a_budget_that_ends_the_run() -> None:
    spend = keel.run({**BASE, "rounds": 4, "privacy": PRIVATE}).records
    budget = {**PRIVATE, "epsilon": (spend[1]["epsilon"] + spend[2]["epsilon"]) / 2}
    run = keel.run({**BASE, "rounds": 4, "privacy": budget})
    assert run.summary["status"] == "stopped"
    assert run.summary["rounds"] == 2
    assert "privacy budget" in str(run.summary["stop_reason"])
    assert run.summary["epsilon"] <= budget["epsilon"]
    with pytest.raises(KeelError, match=r"privacy\.epsilon = 0\.001 is used up in the first round"):
        keel.run({**BASE, "privacy": {**PRIVATE, "epsilon": 0.001}})


@pytest.mark.parametrize(("mechanism", "unit"), [("central", "1 / 20: .* one client"), ("example", "one example")])
def test_a_delta_that_promises_nothing_is_reported(mechanism: str, unit: str, caplog: pytest.LogCaptureFixture) -> None:
    privacy = {**PRIVATE, "mechanism": mechanism, "delta": 0.05}
    spec = make_spec({**BASE, "algorithm": {"name": "fedavg"}, "privacy": privacy})
    build(spec, make_task(spec))
    assert re.search(rf"privacy\.delta = 0\.05 is not below .*{unit}", caplog.text)


def test_the_end_of_a_run_and_its_table_have_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = keel.run({**BASE, "privacy": PRIVATE}, out=tmp_path / "run")
    _report_end(tmp_path / "run", run.summary, as_json=False)
    epsilon = f"{run.summary['epsilon']:.3g}"
    assert f"epsilon {epsilon}, noise multiplier 1," in " ".join(capsys.readouterr().out.split())
    (sheet,) = privacy_losses(compare(find_runs([tmp_path])))
    assert sheet.rows[0][1:] == ["central", "poisson", "1", epsilon, "1e-05"]


def test_a_run_prints_its_noise_first_and_epsilon_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec({**BASE, "privacy": {"clip": 0.5, "epsilon": 3.0, "delta": 1e-5}})
    with show_progress(["GHBM"], [2]) as watch:
        progress = ProgressObserver(lambda of_round: watch(0, of_round))
        run = keel.run(spec, out=tmp_path / "run", hooks=[progress], announce=announce_footprint(quiet=False))
    first, last = (record["epsilon"] for record in run.records)
    noise = run.summary["noise_multiplier"]
    printed = " ".join(capsys.readouterr().err.split())
    assert f"Privacy: mechanism central, noise multiplier {noise:.4g}, epsilon {last:.3g} at delta 1e-05" in printed
    assert "keep the seed secret (0)" in printed
    assert (
        printed.index("Privacy:")
        < printed.index(f"epsilon {first:.3g} GHBM: 2 of 2")
        < printed.index(f"epsilon {last:.3g}", printed.index("2 of 2"))
    )


def test_epsilon_alone_sets_the_noise() -> None:
    run = keel.run({**BASE, "privacy": {"clip": 0.5, "epsilon": 3.0, "delta": 1e-5}})
    assert run.summary["status"] == "finished"
    assert 2.97 < run.records[-1]["epsilon"] <= 3.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"privacy": {"clip": 1.0, "delta": 1e-5}}, "noise or epsilon must be set"),
        ({"privacy": PRIVATE, "participation": {"sampler": "weighted"}}, "participation.sampler = 'poisson'"),
        ({"privacy": {**PRIVATE, "mechanism": "tree"}}, "requires participation.sampler = 'cyclic'"),
        ({"privacy": {**PRIVATE, "accountant": "pld"}, "participation": {"sampler": "uniform"}}, "no bound"),
        ({"privacy": {**PRIVATE, "mechanism": "tree", "accountant": "pld"}, **CYCLIC}, "does not support"),
        ({"privacy": PRIVATE, "server": {"weighting": "examples"}}, "requires server.weighting = 'uniform'"),
        ({"privacy": PRIVATE, "server": {"clip": "adaptive"}}, "clips reports itself"),
        ({"privacy": PRIVATE, "server": {"mean": "median"}}, "takes the mean itself"),
        ({"privacy": PRIVATE, "model": {"buffers": "average"}}, "does not protect the model's buffers"),
        ({"privacy": {**PRIVATE, "quantile": 0.5, "mechanism": "local"}}, "quantile requires mechanism"),
        ({"privacy": {**PRIVATE, "clip_lr": 0.1}}, "clip_lr requires quantile"),
        ({"privacy": {**PRIVATE, "mechanism": "example"}, "engine": {"name": "cohort"}}, "one client at a time"),
        ({"privacy": {**PRIVATE, "mechanism": "example"}, "local": {"steps": 2, "clip": 1.0}}, "remove local.clip"),
        ({"privacy": PRIVATE, "stop": {"gigabytes": 0.1}}, "the bytes disclose how many clients took part"),
        ({"server": {"trim": 0.1}}, "requires mean = 'trimmed_mean'"),
        ({"server": {"mean": "median"}, "model": {"buffers": "average"}}, "does not apply to buffers"),
    ],
)
def test_contradictions_are_refused_before_pytorch_is_needed(more: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError) as error:
        completed({**BASE, "algorithm": {"name": "fedavg"}, **more})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


class Counting(keel.Algorithm):
    """A user's algorithm whose report has an integer."""

    name, title, paper = "counting", "Counting", ""
    mean_suffices = True

    def report(self, path: Any, received: Any, state: Any, ctx: Any) -> Any:
        return {"delta": path.start - path.end, "count": torch.ones(1, dtype=torch.int64)}, {}

    def aggregate(self, server: Any, reports: Any, ctx: Any) -> Any:
        return {"theta": server["theta"] - sum(report.weight * report.message["delta"] for report in reports)}


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_a_report_with_integers_is_refused(mechanism: str) -> None:
    privacy = {**PRIVATE, "mechanism": mechanism}
    with pytest.raises(KeelError, match=r"does not support Counting: 'count' of its report has the type torch\.int64"):
        keel.run({**BASE, "privacy": privacy}, algorithm=Counting())


def test_an_exported_private_model_and_its_card_have_no_seed(tmp_path: Path) -> None:
    run = keel.run({**BASE, "seed": 31337, "privacy": PRIVATE}, out=tmp_path / "run")
    exported = export(RunFolder.open(run.path), tmp_path / "model.safetensors")
    with safe_open(exported.model, framework="pt") as file:
        assert "seed" not in file.metadata()
    card = exported.card.read_text()
    epsilon = f"epsilon {run.summary['epsilon']:.3g} at delta 1e-05 (mechanism central, sampler poisson)"
    assert f"| privacy | {epsilon} |" in card
    assert "31337" not in card


UNIFORM = {"participation": {"rate": 0.2, "sampler": "uniform"}}


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name = 'scaffold'"),
        ({"compression": {"up": "top_k"}}, "compression.error_feedback"),
        ({"local": {"steps": 2, "momentum": 0.9, "optimizer_state": "keep"}}, "local.optimizer_state = 'keep'"),
        ({"model": {"name": "mlp", "buffers": "local"}}, "model.buffers = 'local'"),
    ],
)
def test_a_cohort_of_fixed_size_has_no_bound_if_clients_keep_a_state(more: dict[str, Any], kept: str) -> None:
    """The states of other clients record who took part before, which sampling without replacement has to hide."""
    table = {**BASE, "algorithm": {"name": "fedavg"}, "privacy": PRIVATE, **more}
    with pytest.raises(KeelError) as error:
        make_spec({**table, **UNIFORM})
    assert f"'uniform' where clients keep a state ({kept})" in str(error.value)
    for sampler in ("poisson", "cyclic"):
        make_spec({**table, "participation": {"rate": 0.2, "sampler": sampler}})
    make_spec({**BASE, "algorithm": {"name": "ghbm"}, "privacy": PRIVATE, **UNIFORM})


def test_whose_state_is_kept_must_not_depend_on_who_took_part() -> None:
    with pytest.raises(KeelError, match=r"does not support memory\.keep = 5"):
        make_spec({**BASE, "algorithm": {"name": "scaffold"}, "privacy": PRIVATE, "memory": {"keep": 5}})


def test_the_quantile_must_have_enough_noise_of_its_own() -> None:
    with pytest.raises(KeelError, match=r"privacy\.bit_noise"):
        keel.run({**BASE, "privacy": {**PRIVATE, "quantile": 0.5}})


@pytest.mark.parametrize("name", ["ghbm", "fedavgm", "fedadam", "fedacg"])
def test_momentum_is_a_function_of_released_means_and_costs_nothing(name: str) -> None:
    """Two federations with the same released means have the same models and messages, whatever the reports were."""
    algorithm = algorithm_class(name)()
    theta = torch.linspace(-1, 1, 6)
    from keel.algorithms.base import Context, Report

    sent: list[list[torch.Tensor]] = []
    for split in (0.0, 7.0):  # other reports with the same mean
        server, messages = algorithm.init_server(theta), []
        for t in range(1, 6):
            ctx = Context(t, 4, 2, 0.5, 2.0, 0.1, 1.0, sizes=(6,))
            messages += [*algorithm.broadcast(server, ctx).values()]
            mean = torch.cos(torch.arange(6.0) + t)
            reports = [Report({"delta": mean + sign * split}, 0.5, 3) for sign in (1, -1)]
            server = algorithm.aggregate(server, iter(reports), ctx)
        sent.append(messages)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*sent, strict=True))


def test_poisson_cohorts_have_the_declared_rate_and_may_be_empty() -> None:
    import numpy as np

    from keel.core.sampling import Poisson

    sampler = Poisson(50, 2, seed=0)
    counts = np.bincount(np.concatenate([sampler.cohort(t) for t in range(1, 2001)]), minlength=50)
    assert counts.mean() == pytest.approx(80, rel=0.05)
    sizes = [len(sampler.cohort(t)) for t in range(1, 2001)]
    assert 0 in sizes
    assert np.var(sizes) == pytest.approx(50 * 0.04 * 0.96, rel=0.15)
    assert max(sizes) <= sampler.size


def test_dry_run_prints_the_schedule_of_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    from keel.cli.dry_run import print_estimate

    print_estimate([make_spec({**BASE, "rounds": 3, "privacy": PRIVATE})], as_json=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "noise multiplier 1; epsilon" in printed
    assert "(round 3)" in printed
