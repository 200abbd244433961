"""Specs: errors, defaults, and the text they are read from and written to."""

import tomllib
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel import KeelError, make_spec
from keel.algorithms import REGISTRY
from keel.config.defaults import defaults
from keel.config.overrides import override
from keel.config.schema import Spec
from keel.data.catalog import CATALOG
from keel.models import MODELS

SECTIONS = sorted(Spec.model_fields)
FIELDS = sorted({f for s in Spec.model_fields.values() for f in getattr(s.annotation, "model_fields", {})})
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"sede": 1}, "unknown spec field 'sede'; did you mean 'seed'?"),
    ({"local": {"leraning_rate": 1}}, "unknown local field 'leraning_rate'; known: batch, clip"),
    ({"local": {"epoch": 1}}, "did you mean 'epochs'?"),
    ({"algorithm": {"name": "fedhmb"}}, "unknown algorithm.name 'fedhmb'; did you mean 'fedhbm'?"),
    ({"algorithm": {"name": "ghbm", "tua": 3}}, "unknown hyper-parameter 'tua' for ghbm; did you mean 'tau'?"),
    ({"algorithm": {"name": "ghbm", "tau": 0}}, "algorithm.tau must be greater than or equal to 1 (got 0)"),
    ({"algorithm": {"name": "ghbm", "beta": 1.5}}, "algorithm.beta must be less than or equal to 1 (got 1.5)"),
    (
        {"algorithm": {"name": "fedavg", "beta": 0.5}},
        "unknown hyper-parameter 'beta' for fedavg, which has no hyper-parameters; remove it",
    ),
    ({"algorithm": {"name": "fedadagrad", "beta2": 0.9}}, "unknown hyper-parameter 'beta2' for fedadagrad"),
    ({"algorithm": {"name": "no_such_module:Thing"}}, "cannot import"),
    ({"algorithm": {"name": "keel.errors:KeelError"}}, "must be a subclass of keel.Algorithm"),
    ({"algorithm": {"beta": "high", "name": "ghbm"}}, "algorithm.beta must be a valid number (got 'high')"),
    ({"algorithm": "ghbm"}, "algorithm must be a table (got 'ghbm')"),
    ({"rounds": "many"}, "rounds must be a valid integer (got 'many')"),
    ({"rounds": 0}, "rounds must be greater than or equal to 1 (got 0)"),
    ({"rounds": True}, "rounds must be a valid integer (got True)"),
    ({"evaluation": {"drift": "maybe"}}, "evaluation.drift must be true or false (got 'maybe')"),
    ({"seed": -1}, "seed must be greater than or equal to 0 (got -1)"),
    ({"participation": {"rate": 0.0}}, "participation.rate must be greater than 0 (got 0.0)"),
    ({"participation": {"rate": 1.5}}, "participation.rate must be less than or equal to 1 (got 1.5)"),
    ({"participation": {"sampler": "random"}}, "unknown participation.sampler 'random'; known: cyclic"),
    ({"local": {"lr": -0.1}}, "local.lr must be greater than 0 (got -0.1)"),
    ({"local": {"lr": float("nan")}}, "local.lr must be a finite number"),
    ({"local": {"epochs": 1, "steps": 2}}, "set either local.epochs or local.steps"),
    ({"local": 3}, "local must be a table (got 3)"),
    ({"data": {"name": "digitz"}}, "unknown data.name 'digitz'; did you mean 'digits'?"),
    ({"data": {"alpha": -1.0}}, "data.alpha must be greater than or equal to 0"),
    ({"data": {"name": "arrays"}}, "data.inputs must be set for data.name = 'arrays'"),
    ({"data": {"inputs": "x.npy"}}, "unknown data field 'inputs' for digits"),
    ({"data": {"partition": "key"}}, "partition = 'key' requires natural clients, which digits lacks; use 'dirichlet'"),
    ({"data": {"partition": "pathological"}}, "data.partition must be 'dirichlet', 'dirichlet_per_class', 'classes', "),
    (
        {"data": {"partition": "dirichlet_per_class"}},
        "data.alpha must be set for data.partition = 'dirichlet_per_class'",
    ),
    ({"data": {"partition": "quantity", "alpha": 0.0}}, "data.alpha must be greater than 0 for data.partition"),
    ({"data": {"partition": "classes"}}, "data.classes_per_client must be set for data.partition = 'classes'"),
    (
        {"data": {"partition": "iid", "noise": 0.1}},
        "data.noise = 0.1 requires data.partition = 'feature' (got 'iid')",
    ),
    (
        {"data": {"shards_per_client": 2, "classes_per_client": 2}},
        "data.shards_per_client = 2 requires data.partition = 'shards' (got 'classes')",
    ),
    (
        {"data": {"partition": "iid", "alpha": 1.0}},
        "data.alpha = 1.0 requires data.partition = 'dirichlet', 'dirichlet_per_class' or 'quantity' (got 'iid')",
    ),
    ({"model": {"name": "mpl"}}, "unknown model.name 'mpl'; did you mean 'mlp'?"),
    ({"model": {"name": "mlp", "hiden": [3]}}, "unknown model field 'hiden' for mlp; did you mean 'hidden'?"),
    ({"server": {"clip": 0.0}}, "server.clip must be a positive number, 'adaptive' or false (got 0.0)"),
    ({"server": {"clip": "adaptve"}}, "server.clip must be a positive number, 'adaptive' or false (got 'adaptve')"),
    ({"server": {"largest_weight": 0.0}}, "server.largest_weight must be greater than 0 (got 0.0)"),
    ({"server": {"largest_weight": 1.5}}, "server.largest_weight must be less than or equal to 1 (got 1.5)"),
    ({"engine": {"name": "warp"}}, "unknown engine.name 'warp'"),
]


@pytest.mark.parametrize(("table", "message"), INVALID, ids=lambda value: str(value)[:60])
def test_an_invalid_table_gives_one_line_with_the_field_the_value_and_the_fix(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(KeelError) as caught:
        make_spec(table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)
names = st.one_of(st.sampled_from(FIELDS + SECTIONS), st.text(max_size=6))
tables = st.dictionaries(
    st.one_of(st.sampled_from(SECTIONS), st.text(max_size=6)),
    st.one_of(values, st.dictionaries(names, values, max_size=4)),
    max_size=4,
)


@given(tables)
@hypothesis.settings(max_examples=400)
def test_any_table_is_a_spec_or_gives_an_error_of_one_line(table: dict[str, Any]) -> None:
    try:
        spec = make_spec(table)
    except KeelError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 (both outcomes are valid)
    else:
        assert make_spec(tomllib.loads(spec.to_toml())) == spec


@pytest.mark.parametrize("name", REGISTRY)
def test_reading_a_written_spec_gives_the_same_spec(name: str) -> None:
    spec = make_spec({"algorithm": {"name": name}})
    assert make_spec(tomllib.loads(spec.to_toml())) == spec


def test_defaults_depend_on_the_data_and_the_algorithm() -> None:
    digits = defaults()["digits"]
    spec = make_spec({"algorithm": {"name": "ghbm"}})
    assert spec.rounds == digits["rounds"]
    assert spec.local.lr == digits["with"]["ghbm"]["local"]["lr"]
    assert make_spec({"algorithm": {"name": "ghbm"}, "local": {"lr": 0.7}}).local.lr == 0.7


def test_defaults_name_only_existing_data_sets_models_and_algorithms() -> None:
    families = {layer["like"] for layer in defaults().values() if "like" in layer}
    for data, layer in defaults().items():
        assert data in {"any", *CATALOG, *families}
        for below in (layer, *layer.get("on", {}).values()):
            assert set(below.get("with", {})) <= set(REGISTRY)
        assert set(layer.get("on", {})) <= set(MODELS)


REQUIRED_SETTINGS = {
    "arrays": {"inputs": "x", "labels": "y", "test_inputs": "x", "test_labels": "y", "clients": 2},
    "text": {"file": "x"},
    "images": {"folder": "x"},
    "table": {"file": "x", "client": "c", "label": "y"},
}


@pytest.mark.parametrize("data", CATALOG)
def test_every_data_set_has_defaults_for_every_algorithm(data: str) -> None:
    models = [None, *defaults().get(defaults().get(data, {}).get("like", data), {}).get("on", {})]
    for name in REGISTRY:
        for model in models:
            settings = REQUIRED_SETTINGS.get(data, {})
            table: dict[str, Any] = {"data": {"name": data, **settings}, "algorithm": {"name": name}}
            spec = make_spec({**table, "model": {"name": model}} if model else table)
            assert make_spec(tomllib.loads(spec.to_toml())) == spec


PAPER = """
fedavg       1.5 .01         | 1 .5           | 1 1              | 1 .3
fedprox      1.5 .01 mu=.01  | 1 .5 mu=.1     | 1 1 mu=.0001     | 1 .3 mu=.01
scaffold     1 .01           | 1 .1           | 1 1              | 1 .3
feddyn       1 .01 alpha=.001| 1 .01 alpha=.001 | 1 1 alpha=.009 | 1 .3 alpha=.1
adabest      1 .01 mu=.001   | 1 .01 mu=.001  | 1 1 mu=.009      | 1 .3 mu=.1
mime         1.5 .01         | 1.5 .1         | 1 1              | 1 .3
fedavgm      .05 .1 beta=.85 | .1 .5 beta=.85 | .5 1 beta=.9     | 1 .3 beta=.9
fedacg       .05 .1 beta=.01 | .1 .1 beta=.01 | .1 1 beta=.0001  | 1 .3 beta=.01 lambda_=.9
mimemom      .1 .01 beta=.9  | 1 .01 beta=.85 | .1 1 beta=.9     | 1 .1 beta=.9
mimelitemom  .1 .01 beta=.9  | 1 .01 beta=.85 | .1 1 beta=.9     | 1 .1 beta=.9
fedcm        .1 .1 alpha=.1  | 1 .1 alpha=.1  | .1 1 alpha=.1
ghbm         1 .01 beta=.9   | 1 .01 beta=.9  | 1 1 beta=.9      | 1 .3 beta=.9 tau=20
fedhbm       1 .01 beta=1    | 1 .01 beta=1   | 1 1 beta=1       | 1 .3 beta=1
"""
"""Server learning rate, local learning rate and hyper-parameters, by column: see COLUMNS."""
COLUMNS = [("cifar10", "lenet", 0.001), ("cifar100", "resnet20", 1e-5), ("shakespeare", "char_lstm", 1e-4)]
COLUMNS.append(("stackoverflow", "word_lstm", 0.0))


@pytest.mark.parametrize("line", PAPER.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_defaults_of_the_papers_data_sets_are_its_best_settings(line: str) -> None:
    name, values = line.split(maxsplit=1)
    for (data, model, decay), cell in zip(COLUMNS, values.split("|"), strict=False):
        spec = make_spec({"data": {"name": data}, "model": {"name": model}, "algorithm": {"name": name}})
        server, local, *hyperparameters = cell.split()
        assert (spec.server.lr, spec.local.lr, spec.local.weight_decay) == (float(server), float(local), decay)
        actual = spec.algorithm.settings()
        for setting, value in (assignment.split("=") for assignment in hyperparameters):
            assert actual[setting] == float(value), (data, setting)


def test_the_centralized_baseline_has_the_papers_settings() -> None:
    table = {"data": {"name": "cifar10"}, "model": {"name": "resnet20"}, "algorithm": {"name": "centralized"}}
    spec = make_spec(table)
    assert (spec.rounds, spec.local.lr, spec.local.schedule, spec.evaluation.last) == (150, 0.1, "cosine", 10)
    spec = make_spec({"data": {"name": "shakespeare"}, "algorithm": {"name": "centralized"}})
    assert (spec.rounds, spec.local.settings) == (75, {"momentum": 0.0})


@pytest.mark.parametrize(
    ("field", "value", "scheme"),
    [
        ("alpha", 0.5, "dirichlet"),
        ("classes_per_client", 2, "classes"),
        ("shards_per_client", 3, "shards"),
        ("noise", 0.1, "feature"),
    ],
)
def test_a_field_of_one_scheme_implies_the_scheme(field: str, value: float, scheme: str) -> None:
    assert make_spec({"data": {"name": "shakespeare", field: value}}).data.partition == scheme
    assert make_spec({"data": {"name": "shakespeare"}}).data.partition == "key"


def test_shards_are_two_per_client_by_default() -> None:
    assert make_spec({"data": {"partition": "shards"}}).data.shards_per_client == 2


def test_rounds_models_and_clients_are_those_of_the_paper() -> None:
    spec = make_spec({"data": {"name": "cifar100"}, "model": {"name": "resnet20"}, "algorithm": {"name": "fedavg"}})
    assert (spec.rounds, spec.local.lr, spec.server.lr, spec.local.weight_decay) == (10_000, 0.5, 1.0, 1e-5)
    spec = make_spec({"data": {"name": "cifar10"}, "algorithm": {"name": "fedavgm"}})
    assert (spec.model.name, spec.rounds, spec.local.lr, spec.server.lr) == ("lenet", 20_000, 0.1, 0.05)
    assert spec.algorithm.settings()["beta"] == 0.85
    spec = make_spec({"data": {"name": "shakespeare"}, "algorithm": {"name": "ghbm"}})
    assert (spec.rounds, spec.local.batch, spec.local.lr, spec.data.clients) == (250, 100, 1.0, 100)
    iid = make_spec({"data": {"name": "shakespeare", "partition": "iid"}})
    assert (iid.data.clients, iid.data.min_examples, iid.data.max_examples) == (100, None, 2000)
    spec = make_spec({"data": {"name": "landmarks"}, "model": {"name": "vit_b16"}, "algorithm": {"name": "fedavgm"}})
    assert (spec.local.lr, spec.server.lr, spec.local.epochs, spec.model.buffers) == (0.03, 0.1, 5, None)


def test_steps_replace_the_default_epochs() -> None:
    local = make_spec({"local": {"steps": 7}}).local
    assert (local.steps, local.epochs) == (7, None)


def test_evaluation_last_is_at_most_a_third_of_the_rounds_by_default() -> None:
    assert make_spec({"rounds": 30}).evaluation.last == 10
    assert make_spec({"rounds": 300}).evaluation.last == 100
    assert make_spec({"rounds": 30, "evaluation": {"last": 25}}).evaluation.last == 25


def test_weighted_sampling_weights_reports_uniformly_unless_set() -> None:
    assert make_spec({"participation": {"sampler": "weighted"}}).server.weighting == "uniform"
    explicit = {"participation": {"sampler": "weighted"}, "server": {"weighting": "examples"}}
    assert make_spec(explicit).server.weighting == "examples"


def test_overrides_are_toml_values_or_text() -> None:
    table = override({"local": {"lr": 1}}, ["local.lr=0.5", "algorithm.name=ghbm", "model.hidden=[8, 8]", "seed=3"])
    assert table == {"local": {"lr": 0.5}, "algorithm": {"name": "ghbm"}, "model": {"hidden": [8, 8]}, "seed": 3}


@pytest.mark.parametrize("assignment", ["local.lr", "=3", "seed.x=1"])
def test_an_invalid_override_is_refused(assignment: str) -> None:
    with pytest.raises(KeelError, match="--set"):
        override({"seed": 1}, [assignment])


@pytest.mark.parametrize("value", ['["f1", "auroc"]', "f1,auroc", "f1, auroc"])
def test_metrics_on_the_command_line_have_commas_between(value: str) -> None:
    spec = make_spec(override({}, [f"evaluation.metrics={value}"]))
    assert spec.evaluation.metrics == ["f1", "auroc"]


def test_an_empty_name_of_a_metric_is_an_error() -> None:
    with pytest.raises(KeelError, match=r"evaluation\.metrics"):
        make_spec({"evaluation": {"metrics": "f1,"}})
