import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel import KeelError, make_spec
from keel.algorithms import REGISTRY
from keel.data.catalog import CATALOG
from keel.models import MODELS
from keel.runs.spec import Spec, defaults, override

SECTIONS = sorted(Spec.model_fields)
FIELDS = sorted({f for s in Spec.model_fields.values() for f in getattr(s.annotation, "model_fields", {})})
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sede": 1}, "spec: 'sede' is not known; did you mean 'seed'?"),
    ({"local": {"leraning_rate": 1}}, "local: 'leraning_rate' is not known"),
    ({"local": {"epoch": 1}}, "did you mean 'epochs'?"),
    ({"algorithm": {"name": "fedhmb"}}, "algorithm.name: 'fedhmb' is not known; did you mean 'fedhbm'?"),
    ({"algorithm": {"name": "ghbm", "tua": 3}}, "algorithm (ghbm): 'tua' is not known; did you mean 'tau'?"),
    ({"algorithm": {"name": "ghbm", "tau": 0}}, "algorithm.tau: input should be greater than or equal to 1, not 0"),
    ({"algorithm": {"name": "ghbm", "beta": 1.5}}, "algorithm.beta: input should be less than or equal to 1, not 1.5"),
    ({"algorithm": {"name": "fedavg", "beta": 0.5}}, "has no hyper-parameters"),
    ({"algorithm": {"name": "no_such_module:Thing"}}, "cannot be imported"),
    ({"algorithm": {"name": "keel.errors:KeelError"}}, "is not a subclass of keel.Algorithm"),
    ({"algorithm": {"beta": "high", "name": "ghbm"}}, "algorithm.beta: input should be a valid number, not 'high'"),
    ({"algorithm": "ghbm"}, "algorithm: 'ghbm' is not a table"),
    ({"rounds": "many"}, "rounds: input should be a valid integer, not 'many'"),
    ({"rounds": 0}, "rounds: input should be greater than or equal to 1, not 0"),
    ({"rounds": True}, "rounds: input should be a valid integer, not True"),
    ({"evaluation": {"drift": "maybe"}}, "evaluation.drift: should be true or false, not 'maybe'"),
    ({"seed": -1}, "seed: input should be greater than or equal to 0, not -1"),
    ({"participation": {"rate": 0.0}}, "participation.rate: input should be greater than 0, not 0.0"),
    ({"participation": {"rate": 1.5}}, "participation.rate: input should be less than or equal to 1, not 1.5"),
    ({"participation": {"sampler": "random"}}, "participation.sampler: input should be 'uniform', 'cyclic'"),
    ({"local": {"lr": -0.1}}, "local.lr: input should be greater than 0, not -0.1"),
    ({"local": {"lr": float("nan")}}, "local.lr: input should be a finite number"),
    ({"local": {"epochs": 1, "steps": 2}}, "local: needs one of epochs and steps, and not both"),
    ({"local": 3}, "local: 3 is not a table"),
    ({"data": {"name": "digitz"}}, "data.name: 'digitz' is not known; did you mean 'digits'?"),
    ({"data": {"alpha": -1.0}}, "data.alpha: input should be greater than or equal to 0"),
    ({"data": {"name": "arrays"}}, "data (arrays): needs inputs, labels, test_inputs, test_labels"),
    ({"data": {"inputs": "x.npy"}}, "data (digits): 'inputs' is not known"),
    ({"data": {"partition": "key"}}, "data: digits has no natural key; accepted partitions: 'dirichlet', 'iid'"),
    ({"model": {"name": "mpl"}}, "model.name: 'mpl' is not known; did you mean 'mlp'?"),
    ({"model": {"name": "mlp", "hiden": [3]}}, "model (mlp): 'hiden' is not known; did you mean 'hidden'?"),
    ({"engine": {"name": "warp"}}, "engine.name: input should be 'auto'"),
]


@pytest.mark.parametrize(("table", "words"), WRONG, ids=lambda value: str(value)[:60])
def test_a_mistake_is_named_with_what_would_be_accepted(table: dict[str, Any], words: str) -> None:
    with pytest.raises(KeelError) as caught:
        make_spec(table)
    assert words in str(caught.value)
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
@settings(max_examples=400)
def test_any_table_is_a_spec_or_one_helpful_line(table: dict[str, Any]) -> None:
    try:
        spec = make_spec(table)
    except KeelError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 (either outcome is right)
    else:
        assert make_spec(tomllib.loads(spec.to_toml())) == spec


@pytest.mark.parametrize("name", REGISTRY)
def test_a_resolved_spec_reads_back_as_itself(name: str) -> None:
    spec = make_spec({"algorithm": {"name": name}})
    assert make_spec(tomllib.loads(spec.to_toml())) == spec


def test_defaults_suit_the_data_and_the_algorithm() -> None:
    known = defaults()["digits"]
    spec = make_spec({"algorithm": {"name": "ghbm"}})
    assert spec.rounds == known["rounds"]
    assert spec.local.lr == known["with"]["ghbm"]["local"]["lr"]
    assert make_spec({"algorithm": {"name": "ghbm"}, "local": {"lr": 0.7}}).local.lr == 0.7


def test_every_default_belongs_to_something() -> None:
    families = {layer["like"] for layer in defaults().values() if "like" in layer}
    for data, layer in defaults().items():
        assert data in {"any", *CATALOG, *families}
        for below in (layer, *layer.get("on", {}).values()):
            assert set(below.get("with", {})) <= set(REGISTRY)
        assert set(layer.get("on", {})) <= set(MODELS)


OWN = {
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
            table: dict[str, Any] = {"data": {"name": data, **OWN.get(data, {})}, "algorithm": {"name": name}}
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
"""  # server rate, local rate, its own: LeNet and ResNet-20 on CIFAR, Shakespeare, Stack Overflow
COLUMNS = [("cifar10", "lenet", 0.001), ("cifar100", "resnet20", 1e-5), ("shakespeare", "char_lstm", 1e-4)]
COLUMNS.append(("stackoverflow", "word_lstm", 0.0))


@pytest.mark.parametrize("line", PAPER.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_papers_table_is_what_its_data_sets_begin_with(line: str) -> None:
    name, values = line.split(maxsplit=1)
    for (data, model, decay), cell in zip(COLUMNS, values.split("|"), strict=False):
        spec = make_spec({"data": {"name": data}, "model": {"name": model}, "algorithm": {"name": name}})
        server, local, *own = cell.split()
        assert (spec.server.lr, spec.local.lr, spec.local.weight_decay) == (float(server), float(local), decay)
        settings_of = spec.algorithm.settings()
        for setting, value in (word.split("=") for word in own):
            assert settings_of[setting] == float(value), (data, setting)


def test_the_papers_reference_is_trained_as_it_says() -> None:
    table = {"data": {"name": "cifar10"}, "model": {"name": "resnet20"}, "algorithm": {"name": "centralized"}}
    spec = make_spec(table)
    assert (spec.rounds, spec.local.lr, spec.local.schedule, spec.evaluation.last) == (150, 0.1, "cosine", 10)
    spec = make_spec({"data": {"name": "shakespeare"}, "algorithm": {"name": "centralized"}})
    assert (spec.rounds, spec.algorithm.settings()["momentum"]) == (75, 0.0)


def test_a_concentration_asks_for_label_mixes() -> None:
    assert make_spec({"data": {"name": "shakespeare", "alpha": 0.5}}).data.partition == "dirichlet"
    assert make_spec({"data": {"name": "shakespeare"}}).data.partition == "key"


def test_splits_and_rounds_are_the_papers_too() -> None:
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


def test_steps_take_the_place_of_default_epochs() -> None:
    local = make_spec({"local": {"steps": 7}}).local
    assert (local.steps, local.epochs) == (7, None)


def test_the_last_rounds_of_a_short_run_are_fewer() -> None:
    assert make_spec({"rounds": 30}).evaluation.last == 10
    assert make_spec({"rounds": 300}).evaluation.last == 100
    assert make_spec({"rounds": 30, "evaluation": {"last": 25}}).evaluation.last == 25


def test_weighted_sampling_is_not_weighted_twice() -> None:
    assert make_spec({"participation": {"sampler": "weighted"}}).server.weighting == "uniform"
    asked = {"participation": {"sampler": "weighted"}, "server": {"weighting": "examples"}}
    assert make_spec(asked).server.weighting == "examples"


def test_overrides_are_toml_values_or_text() -> None:
    table = override({"local": {"lr": 1}}, ["local.lr=0.5", "algorithm.name=ghbm", "model.hidden=[8, 8]", "seed=3"])
    assert table == {"local": {"lr": 0.5}, "algorithm": {"name": "ghbm"}, "model": {"hidden": [8, 8]}, "seed": 3}


@pytest.mark.parametrize("assignment", ["local.lr", "=3", "seed.x=1"])
def test_a_wrong_override_is_refused(assignment: str) -> None:
    with pytest.raises(KeelError, match="--set"):
        override({"seed": 1}, [assignment])
