"""Tasks that users bring: other inputs, targets, losses and metrics, in every engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import keel
from keel import KeelError
from keel.core.examples import Examples, FederatedData, Partition, TaskKind
from keel.core.stored_inputs import Items, SeveralArrays
from keel.engines import FORKS
from keel.runs.export import export
from keel.runs.folder import RunFolder

TABLE: dict[str, Any] = {
    "rounds": 2,
    "algorithm": {"name": "ghbm"},
    "local": {"epochs": 1, "batch": 4, "lr": 0.05},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 1},
}
ENGINES = ["serial", "cohort", *(["pool"] if FORKS else [])]


def federated(inputs: Any, targets: Tensor, task: TaskKind, classes: int = 0, clients: int = 6) -> FederatedData:
    examples = Examples(cast(Tensor, inputs), targets)
    rows = np.array_split(np.arange(len(targets)), clients)
    return FederatedData("own", examples, examples, Partition.of(rows), classes, task=task)


class Masked(nn.Module):
    """Takes tokens and a mask by name, and returns an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        embedded = self.embedding(input_ids) * attention_mask[:, :, None]
        return {"logits": self.linear(embedded.sum(1) / attention_mask.sum(1, keepdim=True))}


def two_inputs() -> FederatedData:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (60, 5), generator=generator)
    mask = (torch.arange(5) <= torch.arange(60)[:, None] % 5).long()
    return federated(SeveralArrays({"input_ids": ids, "attention_mask": mask}), ids[:, 0] % 3, "classification", 3)


def run(data: FederatedData, module: nn.Module, out: Path, engine: str, **tables: Any) -> keel.Run:
    table = {**TABLE, "engine": {"name": engine, "workers": 2}, **tables}
    loss = tables.pop("loss", None)
    return keel.run(
        {key: value for key, value in table.items() if key != "loss"}, model=module, data=data, loss=loss, out=out
    )


def test_two_named_inputs_train_equally_in_every_engine(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Masked()
    runs = {engine: run(two_inputs(), model, tmp_path / engine, engine) for engine in ENGINES}
    for other in runs.values():
        torch.testing.assert_close(other.module.state_dict(), runs["serial"].module.state_dict())
    trained = runs["serial"].module
    assert type(trained) is Masked
    ids, mask = torch.randint(20, (4, 5)), torch.ones(4, 5)
    assert trained(ids, mask)["logits"].shape == (4, 3)


def naive_rounds(model: nn.Module, inputs: Tensor, targets: Tensor, clients: int) -> nn.Module:
    """One round of FedAvg with full participation and one full-batch step per client, for the mean squared error."""
    deltas = []
    for rows in np.array_split(np.arange(len(targets)), clients):
        loss = F.mse_loss(model(inputs[rows])[:, 0], targets[rows])
        deltas.append(torch.autograd.grad(loss, list(model.parameters())))
    with torch.no_grad():
        for position, parameter in enumerate(model.parameters()):
            parameter -= 0.1 * torch.stack([delta[position] for delta in deltas]).mean(0)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_regression_equals_its_formula(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(60, 3)
    targets, model = inputs @ torch.tensor([1.0, -2.0, 0.5]), nn.Linear(3, 1)
    ended = run(
        federated(inputs, targets, "regression"),
        model,
        tmp_path / "run",
        engine,
        rounds=1,
        algorithm={"name": "fedavg"},
        local={"epochs": 1, "batch": 10, "lr": 0.1},
        participation={"rate": 1.0},
        evaluation={"metrics": ["mae", "r2"]},
    )
    expected = naive_rounds(model, inputs, targets, clients=6)
    torch.testing.assert_close(ended.module.state_dict(), expected.state_dict())
    record = cast(dict[str, float], ended.records[-1])
    with torch.no_grad():
        error = expected(inputs)[:, 0] - targets
    assert record["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert record["test_loss"] == pytest.approx(float(error.pow(2).mean()), rel=1e-5)
    assert "accuracy" not in record
    assert (ended.summary["metric"], ended.summary["maximize"]) == ("mae", False)
    assert ended.summary["value"] == record["mae"]


@pytest.mark.parametrize("engine", ENGINES)
def test_metrics_do_not_depend_on_the_engine(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(1200, 4), torch.randint(2, (1200, 3)).float()
    data = federated(inputs, targets, "multilabel")  # three chunks of test examples
    torch.manual_seed(1)
    ended = run(
        data, nn.Linear(4, 3), tmp_path / "run", engine, evaluation={"every": 2, "metrics": ["auroc", "f1"]}, rounds=2
    )
    record = cast(dict[str, float], ended.records[-1])
    with torch.no_grad():
        scores = ended.module(inputs)
    pairs = [scores[targets[:, k] == 1, k][:, None] - scores[targets[:, k] == 0, k][None] for k in range(3)]
    assert record["auroc"] == pytest.approx(float(np.mean([float((p > 0).double().mean()) for p in pairs])), abs=1e-5)


class Lines(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((1 + row % 4,), row % 5), row % 5


def pad(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([line for line, _ in items], True), torch.tensor([label for _, label in items])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).sum(1)


def test_sequences_of_different_lengths_train_by_a_collate_function(tmp_path: Path) -> None:
    targets = torch.tensor([row % 5 for row in range(48)])
    data = federated(Items(Lines(), pad), targets, "classification", 5)
    torch.manual_seed(0)
    model = Bag()
    runs = [run(data, model, tmp_path / name, name) for name in ("auto", "serial")]
    assert runs[0].summary["model_sha256"] == runs[1].summary["model_sha256"]
    with pytest.raises(KeelError, match="the length of the inputs differs from minibatch to minibatch"):
        run(data, model, tmp_path / "cohort", "cohort")


def test_integers_go_to_the_model_as_it_takes_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(5, (48, 3))
    data = federated(tokens, tokens[:, 0], "classification", 5)
    seen: dict[str, torch.dtype] = {}

    class Watching(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            result = super().forward(inputs)
            seen["linear"] = inputs.dtype
            return result

    run(data, Watching(3, 5), tmp_path / "linear", "serial")
    assert seen["linear"] == torch.float32
    run(data, Bag(), tmp_path / "bag", "serial")  # an embedding takes only integers


def test_each_client_is_evaluated_on_its_own_held_out_examples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(120, 3)
    targets = (inputs[:, 0] > 0).long()
    data, model = federated(inputs, targets, "classification", 2), nn.Linear(3, 2)
    records = []
    for engine in ENGINES:
        ended = run(data, model, tmp_path / engine, engine, evaluation={"every": 2, "clients": 100}, rounds=2)
        records.append(cast(dict[str, Any], ended.records[-1])["clients"])
    assert records[0] == records[-1]
    assert records[0]["count"] == 6
    assert records[0]["examples"] == 6 * 4  # a fifth of 20 examples
    assert records[0]["worst_decile"] <= records[0]["mean"] <= records[0]["best_decile"]
    tuned = run(
        data,
        model,
        tmp_path / "tuned",
        "serial",
        evaluation={"every": 2, "clients": 3, "finetune_steps": 20, "metrics": ["test_loss"]},
        rounds=2,
        local={"epochs": 1, "batch": 4, "lr": 0.5},
    )
    clients = cast(dict[str, Any], tuned.records[-1])["clients"]
    assert clients["count"] == 3
    again = run(
        data,
        model,
        tmp_path / "untuned",
        "serial",
        evaluation={"every": 2, "clients": 3, "metrics": ["test_loss"]},
        rounds=2,
        local={"epochs": 1, "batch": 4, "lr": 0.5},
    )
    assert tuned.summary["model_sha256"] == again.summary["model_sha256"]
    assert clients["mean"] < cast(dict[str, Any], again.records[-1])["clients"]["mean"]


def test_test_examples_that_belong_to_clients_are_used_for_their_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 3), torch.randint(2, (60,))
    data = federated(inputs, targets, "classification", 2)
    owners = np.repeat([5, 0, 3], 20)
    model = nn.Linear(3, 2)
    ended = run(
        replace(data, test_clients=owners), model, tmp_path / "run", "serial", evaluation={"every": 2, "clients": 9}
    )
    with torch.no_grad():
        correct = (ended.module(inputs).argmax(1) == targets).double()
    means = [float(correct[owners == client].mean()) for client in (0, 3, 5)]
    clients = cast(dict[str, Any], ended.records[-1])["clients"]
    assert clients["mean"] == pytest.approx(np.mean(means))
    assert clients["std"] == pytest.approx(np.std(means))
    assert clients["worst_decile"] == pytest.approx(min(means))
    assert clients["examples"] == 60


def test_a_hugging_face_model_trains_by_its_own_loss_as_it_comes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra vision, which has transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(20, (36, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}
    data = federated(SeveralArrays(inputs), ids[:, 0] % 3, "classification", 3)
    own = run(data, model, tmp_path / "own", "auto", evaluation={"every": 1, "metrics": ["accuracy", "f1"]})
    del inputs["labels"]
    data = federated(SeveralArrays(inputs), ids[:, 0] % 3, "classification", 3)
    cross_entropy = run(data, model, tmp_path / "cross_entropy", "auto")
    assert own.summary["last_accuracy"] == cross_entropy.summary["last_accuracy"]
    assert own.summary["test_loss"] == pytest.approx(cross_entropy.summary["test_loss"], rel=1e-4)
    torch.testing.assert_close(own.module.state_dict(), cross_entropy.module.state_dict(), rtol=1e-3, atol=1e-4)
    assert type(own.module) is transformers.BertForSequenceClassification


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"metrics": ["rmse"]}, "'rmse' does not suit classification targets"),
        ({"metrics": ["f1", "f1"]}, "'f1' is given twice"),
        ({"metrics": ["auroch"]}, "unknown evaluation.metrics 'auroch'"),
        ({"finetune_steps": 3}, "finetune_steps requires clients"),
        ({"maximize": True}, "maximize requires evaluation.metrics"),
    ],
)
def test_metrics_that_cannot_be_measured_are_refused(evaluation: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=message):
        run(two_inputs(), Masked(), tmp_path / "run", "serial", evaluation=evaluation)
    assert not (tmp_path / "run").exists()


def test_targets_that_do_not_fit_the_loss_are_refused(tmp_path: Path) -> None:
    data = federated(torch.randn(12, 3), torch.randn(12, 2), "regression")
    with pytest.raises(KeelError, match=r"loss fails on outputs of shape \(3,\) and targets of shape \(2,\)"):
        run(data, nn.Linear(3, 3), tmp_path / "run", "serial")


def median_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs().median()


def test_metrics_that_were_passed_are_passed_again_to_resume(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(60, 3)
    data, model = federated(inputs, inputs[:, 0], "regression"), nn.Linear(3, 1)
    with pytest.raises(KeelError, match=r"evaluation.maximize must be true or false"):
        keel.run(TABLE, model=model, data=data, metrics=[median_error], out=tmp_path / "none")
    spec = {**TABLE, "rounds": 4}
    functions = [Directed(median_error)]
    whole = keel.run(spec, model=model, data=data, metrics=functions, out=tmp_path / "whole")
    rounds = iter([False, True])
    part = keel.run(
        spec, model=model, data=data, metrics=functions, out=tmp_path / "part", stop=lambda: next(rounds, True)
    )
    assert part.status == "interrupted"
    with pytest.raises(KeelError, match=r"pass model, data and metrics again"):
        keel.resume(part.path)
    with pytest.raises(KeelError, match="metrics were passed as objects when this run started"):
        keel.resume(part.path, model=model, data=data, metrics=["mae"])
    resumed = keel.resume(part.path, model=model, data=data, metrics=functions)
    assert resumed.records == whole.records
    assert resumed.summary["value"] == whole.summary["value"]
    with pytest.raises(KeelError, match=r"evaluation.metrics = \['mae'\] conflicts with metrics="):
        keel.run({**TABLE, "evaluation": {"metrics": ["mae"]}}, model=model, data=data, metrics=["r2"])


class Directed:
    """A metric with a direction."""

    higher_is_better = False

    def __init__(self, function: Any):
        self.function = function

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets)


def test_the_best_model_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(120, 3), torch.randint(2, (120,))
    data, model = federated(inputs, targets, "classification", 2), nn.Linear(3, 2)
    spec = {**TABLE, "rounds": 6, "evaluation": {"on": "validation", "every": 1, "select": True}}
    ended = keel.run(
        {**spec, "local": {"epochs": 1, "batch": 4, "lr": 1.0}}, model=model, data=data, out=tmp_path / "run"
    )
    best = next(r for r in ended.records if r["round"] == ended.summary["best_round"])
    assert best["accuracy"] == ended.summary["best_value"] == max(r["accuracy"] for r in ended.records)
    folder = RunFolder.open(ended.path)
    exported = export(folder, tmp_path / "best.safetensors", best=True)
    assert exported.round == ended.summary["best_round"]
    tensors = load_file(exported.model)
    for name, tensor in keel.load(ended.path).state_dict(best=True).items():
        assert torch.equal(tensors[name], tensor)
    other = keel.run(TABLE, model=model, data=data, out=tmp_path / "other")
    with pytest.raises(KeelError, match="kept no best model"):
        export(RunFolder.open(other.path), tmp_path / "none.safetensors", best=True)


def test_clients_are_fine_tuned_for_a_pooled_algorithm_too(tmp_path: Path) -> None:
    data = federated(torch.randn(60, 3), torch.randint(2, (60,)), "classification", 2)
    evaluation = {"every": 2, "clients": 4, "finetune_steps": 2}
    ended = run(
        data, nn.Linear(3, 2), tmp_path / "run", "serial", algorithm={"name": "centralized"}, evaluation=evaluation
    )
    assert cast(dict[str, Any], ended.records[-1])["clients"]["count"] == 4


def mistaken(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.no_such_method()


def needs_many(outputs: Tensor, targets: Tensor) -> float:
    if len(targets) < 10:
        raise ValueError("too few")
    return 0.5


def test_a_metric_with_a_mistake_is_refused_before_the_run(tmp_path: Path) -> None:
    data = federated(torch.randn(60, 3), torch.randint(2, (60,)), "classification", 2)
    spec = {**TABLE, "evaluation": {"every": 1, "maximize": True}}
    with pytest.raises(KeelError, match=r"evaluation.metrics: 'mistaken' fails \(.*no_such_method"):
        keel.run(spec, model=nn.Linear(3, 2), data=data, metrics=[mistaken], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    ended = keel.run(spec, model=nn.Linear(3, 2), data=data, metrics=[needs_many], out=tmp_path / "many")
    assert ended.summary["value"] == 0.5


def test_a_loss_that_broadcasts_a_column_over_the_targets_is_refused(tmp_path: Path) -> None:
    data = federated(torch.randn(60, 3), torch.randn(60), "regression")
    for loss in (nn.MSELoss(), nn.MSELoss(reduction="none"), lambda o, t: ((o - t) ** 2).mean()):
        with pytest.raises(KeelError, match=r"loss broadcasts outputs of shape \(1,\) over targets of shape \(\)"):
            run(data, nn.Linear(3, 1), tmp_path / "run", "serial", loss=loss)
    flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    run(data, flat, tmp_path / "flat", "serial", loss=nn.MSELoss())
    run(data, nn.Linear(3, 1), tmp_path / "own", "serial", loss=lambda o, t: (o[:, 0] - t) ** 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_combined_metrics_and_chunks_of_any_size_are_measured(engine: str, tmp_path: Path) -> None:
    import torchmetrics  # here: it takes seconds, and every worker imports this module

    torch.manual_seed(0)
    tokens = torch.randint(4, (1100, 6))
    tokens[:512, 1:] = -1  # the first chunk of test examples has fewest targets
    data = federated(torch.randn(1100, 6, 3), tokens, "sequence", 4)
    error = 1 - torchmetrics.classification.MulticlassAccuracy(4, average="micro")
    ended = keel.run(
        {**TABLE, "evaluation": {"every": 2, "maximize": False}, "engine": {"name": engine, "workers": 2}},
        model=nn.Linear(3, 4),
        data=data,
        metrics=[error, "auroc"],
        out=tmp_path / "run",
    )
    record = cast(dict[str, float], ended.records[-1])
    assert ended.summary["last_value"] == pytest.approx(1 - record["accuracy"], abs=1e-6)
    assert 0.4 < record["auroc"] < 0.6


def test_clients_with_local_buffers_are_evaluated_as_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = 5 + torch.randn(240, 3)
    data = federated(inputs, (inputs[:, 0] > 5).long(), "classification", 2, clients=4)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    evaluation = {"every": 1, "clients": 4}
    ended = run(data, model, tmp_path / "run", "serial", rounds=20, evaluation=evaluation, model={"buffers": "local"})
    record = cast(dict[str, Any], ended.records[-1])
    assert record["clients"]["mean"] > record["accuracy"] - 0.1


def test_a_metric_that_is_not_defined_for_a_client_leaves_it_out(tmp_path: Path) -> None:
    data = federated(torch.randn(36, 3), torch.randn(36), "regression")  # one held-out example each
    ended = run(
        data, nn.Linear(3, 1), tmp_path / "run", "serial", evaluation={"every": 2, "clients": 6, "metrics": ["r2"]}
    )
    assert cast(dict[str, Any], ended.records[-1])["clients"] == {"count": 0, "examples": 6}


def test_negative_tokens_are_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(4, (60, 6))
    tokens[:, 4:] = -1
    inputs, results = torch.randn(60, 6, 3), []
    for padding in (-1, -7, -100):
        targets = tokens.clone()
        targets[targets < 0] = padding
        torch.manual_seed(1)
        ended = run(federated(inputs, targets, "sequence", 4), nn.Linear(3, 4), tmp_path / str(padding), "serial")
        results.append((ended.summary["model_sha256"], ended.summary["accuracy"], ended.summary["test_loss"]))
    assert len(set(results)) == 1


def test_a_causal_language_model_is_measured_on_the_next_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra vision, which has transformers")
    config = transformers.GPT2Config(vocab_size=5, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    ids = (torch.arange(8) + torch.arange(60)[:, None]) % 5
    data = federated(SeveralArrays({"input_ids": ids, "labels": ids}), ids, "sequence", 5)
    spec = {"rounds": 30, "local": {"epochs": 2, "batch": 10, "lr": 0.5}, "participation": {"rate": 1.0}}
    spec |= {"algorithm": {"name": "fedavg"}, "evaluation": {"every": 30, "last": 1}}
    ended = keel.run(spec, model=model, data=data, metrics=["accuracy", "perplexity"], out=tmp_path / "run")
    with torch.no_grad():
        logits = ended.module(input_ids=ids).logits
    expected = (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
    assert ended.summary["last_value"] == pytest.approx(float(expected))
    assert float(expected) > 0.9
    perplexity = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert cast(dict[str, float], ended.records[-1])["perplexity"] == pytest.approx(float(perplexity), rel=1e-4)


def test_an_observer_must_not_overwrite_a_metric(tmp_path: Path) -> None:
    class Mae(keel.Observer):
        def round_ended(self, event: Any) -> dict[str, float]:
            return {"mae": 1.0}

    data = federated(torch.randn(60, 3), torch.randn(60), "regression")
    with pytest.raises(KeelError, match="must not return the key 'mae'"):
        keel.run(TABLE, model=nn.Linear(3, 1), data=data, metrics=["mae"], hooks=[Mae()], out=tmp_path / "run")
