"""Random experiments on tiny data, drawn field by field: what the engines have to agree on."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn

from keel.algorithms import REGISTRY, algorithm_class
from keel.core.examples import Examples, FederatedData, Partition
from keel.core.sampling import Cyclic
from keel.data.transforms import Pixels

IMAGE = (1, 8, 8)
INPUTS = 5


@dataclass(frozen=True)
class Experiment:
    """A spec and the objects that are passed to keel.run with it."""

    table: dict[str, Any]
    objects: Callable[[], dict[str, Any]]
    """Makes the objects anew, so that no run sees those of another."""
    clients: int

    @property
    def rounds(self) -> int:
        return self.table["rounds"]

    @property
    def in_float32(self) -> "Experiment":
        """The same experiment without half precision."""
        local, memory = (
            {k: v for k, v in self.table[name].items() if k != "precision"} for name in ("local", "memory")
        )
        return replace(self, table={**self.table, "local": local, "memory": memory})


def draw(rng: Random, replayed: bool) -> Experiment:
    """Any experiment that Keel accepts, with learning rates at which rounding errors do not grow quickly.

    Args:
        replayed: Whether the model may be recorded as a program, which takes longest and which `cohort` requires.
    """
    sizes = draw_sizes(rng)
    images, task = rng.random() < 0.3, rng.choice(["labels", "labels", "labels", "numbers", "flags"])
    seed, classes = rng.randrange(1000), rng.randint(2, 4)
    model, buffers = draw_model(rng, images, classes)
    normalised = buffers in ("average", "local")
    sizes = [max(2, size) for size in sizes] if normalised else sizes
    data = partial(make_data, seed, sizes, images, task, classes, augmented=images and rng.random() < 0.5)
    passed: dict[str, Callable[[], Any]] = {
        "data": data,
        "model": partial(seeded, seed, model, replayed=replayed),
    }
    if rng.random() < 0.2:
        passed["metrics"] = lambda: [mean_output]
    if task == "labels" and rng.random() < 0.2:
        passed["loss"] = lambda: penalised_loss
    table = {
        "seed": seed,
        "rounds": rng.randint(1, 4),
        "algorithm": draw_algorithm(rng),
        "model": {} if buffers is None else {"buffers": buffers},
        "local": draw_local(rng),
        "server": draw_server(rng),
        "participation": draw_participation(rng, len(sizes)),
        "evaluation": draw_evaluation(rng, sizes),
        "stop": draw_stop(rng, task),
        "memory": draw_memory(rng, len(sizes)),
    }
    if normalised:
        table["local"] |= {"batch": 100}  # a minibatch of one example has no variance, nor has one held-out example
        table["local"].pop("microbatch", None)
        table["evaluation"] = {"every": rng.randint(1, 3), "last": 1}
    plain = table["algorithm"]["name"] not in ("fedadamw", "delta_sgd", "fednova")
    if plain and rng.random() < 0.15:
        table["local"] |= {"optimizer_state": "reset"}
        passed["optimizer"] = rng.choice([lambda: partial(torch.optim.RAdam, eps=1e-4), lambda: NormalisedSGD])
    elif plain:
        table["local"] |= draw_optimizer(rng)
    elif momentum := table["algorithm"].get("momentum"):  # which FedNova's rule contains
        table["local"] |= {"momentum": momentum}
    if table["algorithm"]["name"] != "centralized" and rng.random() < 0.1:  # which has one client
        table["participation"] = {}
        passed["sampler"] = partial(Cyclic, len(sizes), rng.randint(1, len(sizes)), seed)
    return Experiment(table, lambda: {name: make() for name, make in passed.items()}, len(sizes))


def draw_sizes(rng: Random) -> list[int]:
    """The number of examples of each client: equal, unequal, single examples, one client, or one very large one."""
    clients = rng.randint(2, 9)
    return rng.choice(
        [
            [rng.randint(1, 12)] * clients,
            [rng.randint(1, 20) for _ in range(clients)],
            [1] * clients,
            [rng.randint(1, 30)],
            [*(rng.randint(1, 4) for _ in range(clients)), 70],
            [rng.randint(1, 5) for _ in range(40)],
        ]
    )


def make_data(
    seed: int, sizes: list[int], images: bool, task: str, classes: int, augmented: bool = False
) -> FederatedData:
    """Examples of clients, most of which lack some classes."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(sizes)), sizes)
    labels = (client + rng.integers(0, 2, len(client))) % classes
    labels[0] = classes - 1
    shape = IMAGE if images else (INPUTS,)
    features = rng.normal(size=(len(client), *shape)) + labels.reshape(-1, *[1] * len(shape))
    inputs = torch.from_numpy(features).float()
    transform = {}
    if augmented:
        inputs = (inputs * 30 + 100).clamp(0, 255).byte()
        transform = {"transform": Pixels((0.4,), (0.3,), margin=1)}
    targets = {
        "labels": torch.from_numpy(labels),
        "numbers": torch.from_numpy(features.reshape(len(client), -1)[:, :classes]).float(),
        "flags": torch.from_numpy(np.eye(classes)[labels]).float(),
    }[task]
    train = Examples(inputs, targets)
    of = {"labels": "classification", "numbers": "regression", "flags": "multilabel"}[task]
    parts = [np.flatnonzero(client == number) for number in range(len(sizes))]
    known = classes if task == "labels" else 0
    return FederatedData(
        "drawn", train, train[np.arange(min(30, len(train)))], Partition.of(parts), known, task=of, **transform
    )


def seeded(seed: int, make: Callable[[], nn.Module], replayed: bool) -> nn.Module:
    """The model; with a hook, unless it is `replayed`: recording programs takes longest, and a hook prevents it."""
    torch.manual_seed(seed)
    module = make()
    if not replayed:
        module.register_forward_hook(lambda *_: None)
    return module


class TwoHeads(nn.Module):
    """A user's model: a frozen layer, a shared parameter and a residual connection."""

    def __init__(self, inputs: int, classes: int):
        super().__init__()
        self.frozen = nn.Linear(inputs, 6).requires_grad_(False)
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, classes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(inputs.flatten(1)))
        return self.head(hidden + self.scale * torch.tanh(self.hidden(hidden))) * self.scale


def draw_model(rng: Random, images: bool, classes: int) -> tuple[Callable[[], nn.Module], str | None]:
    """A function that makes a model, and what becomes of its buffers."""
    inputs = 64 if images else INPUTS

    def perceptron(*between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 6), *between, nn.Tanh(), nn.Linear(6, classes))

    def convolutional() -> nn.Module:
        layers = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, classes))

    def normalised() -> nn.Module:
        return perceptron(nn.BatchNorm1d(6))

    models: list[tuple[Callable[[], nn.Module], str | None]] = [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes)), None),
        (perceptron, None),
        (lambda: perceptron(nn.LayerNorm(6)), None),
        (lambda: perceptron(nn.Dropout(0.3)), None),
        (lambda: TwoHeads(inputs, classes), None),
        (normalised, rng.choice(["average", "local"])),
    ]

    def group_normalised() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))

    if images:
        models += [(convolutional, None)] * 3
        models.append((group_normalised, "group_norm"))
    return rng.choice(models)


def draw_algorithm(rng: Random) -> dict[str, Any]:
    """Any registered algorithm with random valid hyper-parameters; some are left at their defaults."""
    name = rng.choice(sorted(REGISTRY))
    cls = algorithm_class(name)
    chosen = [field for field in fields(cls) if rng.random() < 0.6]
    settings = {field.name: draw_value(rng, field.type, field.default) for field in chosen}
    if name == "fedper":
        settings["personal_tensors"] = rng.randint(0, 1)  # a linear model has two tensors
    return {"name": name, **settings}


def draw_value(rng: Random, kind: Any, default: Any) -> Any:
    """A value of a hyper-parameter's type: within its limits, at them, or about the default."""
    if get_origin(kind) is Literal:
        return rng.choice(get_args(kind))
    if kind is bool:
        return rng.random() < 0.5
    if get_origin(kind) is not Annotated:
        return draw_value(rng, rng.choice(get_args(kind)), default)
    number, info = get_args(kind)
    limits = {type(limit): limit for limit in info.metadata}
    if number is int:
        return rng.randint(limits[Ge].ge, limits[Ge].ge + 3)
    if Le in limits or Lt in limits:
        return rng.choice([0.0, 1.0 if Le in limits else 0.5, rng.random()])
    assert Ge in limits or Gt in limits
    return rng.choice([0.0] * (Ge in limits) + [default * 2 ** rng.uniform(-2, 2)] * 3)


def draw_local(rng: Random) -> dict[str, Any]:
    local: dict[str, Any] = {
        "batch": rng.choice([1, 2, 3, 4, 8, 100]),
        "lr": 10 ** rng.uniform(-2, -1),
        "drop_last": rng.random() < 0.3,
        "schedule": rng.choice(["constant", "cosine", "linear", "exponential"]),
        "warmup": rng.choice([0, 0, 2]),
        "weight_decay": rng.choice([0.0, 0.01]),
        "decay_biases": rng.random() < 0.5,
    }
    local |= rng.choice([{"epochs": 1}, {"epochs": 2}, {"steps": 1}, {"steps": rng.randint(2, 5)}])
    if rng.random() < 0.2:
        local["clip"] = 10 ** rng.uniform(-1, 1)
    if rng.random() < 0.1:
        local["microbatch"] = rng.randint(1, 3)
    if rng.random() < 0.1:
        local["precision"] = "bf16"
    return local


def draw_optimizer(rng: Random) -> dict[str, Any]:
    """The local optimiser; with an eps that keeps a gradient of rounding errors from becoming a full step."""
    optimizer = rng.choice(
        [
            {"optimizer": "sgd"},
            {"optimizer": "sgd", "momentum": 0.9, "nesterov": rng.random() < 0.5},
            {"optimizer": "adam", "eps": 1e-3, "betas": [0.8, 0.9], "amsgrad": rng.random() < 0.5},
            {"optimizer": "adamw", "eps": 1e-3},
            {"optimizer": "adagrad", "eps": 1e-3, "lr_decay": 0.1},
            {"optimizer": "rmsprop", "eps": 1e-3, "momentum": 0.5, "centered": rng.random() < 0.5},
        ]
    )
    return {**optimizer, "optimizer_state": rng.choice(["reset", "keep"])}


def draw_server(rng: Random) -> dict[str, Any]:
    server: dict[str, Any] = {
        "lr": rng.choice([0.1, 0.5, 1.0]),
        "schedule": rng.choice(["constant", "constant", "cosine"]),
        "weighting": rng.choice(["examples", "uniform"]),
    }
    if rng.random() < 0.25:
        server["largest_weight"] = rng.choice([0.1, 0.3, 0.6])
    if rng.random() < 0.25:
        server["clip"] = rng.choice(["adaptive", 0.01, 1.0])
    return server


def draw_participation(rng: Random, clients: int) -> dict[str, Any]:
    """A cohort of one, of all clients, or of some."""
    rate = rng.choice([1 / clients, 1.0, rng.uniform(0.05, 1.0)])
    return {"rate": rate, "sampler": rng.choice(["uniform", "cyclic", "weighted"])}


def draw_evaluation(rng: Random, sizes: list[int]) -> dict[str, Any]:
    evaluation: dict[str, Any] = {"every": rng.randint(1, 3), "last": 1}
    if rng.random() < 0.15:
        evaluation["drift"] = True
    if rng.random() < 0.1:
        evaluation["deviation"] = [1, 2]
    if max(sizes) >= 5 and rng.random() < 0.3:
        evaluation |= {"on": "validation", "select": rng.random() < 0.5}
    if max(sizes) >= 10 and rng.random() < 0.3:
        evaluation |= {"clients": rng.randint(1, len(sizes))}
        evaluation |= {"finetune_steps": 2} if rng.random() < 0.5 else {}
    return evaluation


def draw_stop(rng: Random, task: str) -> dict[str, Any]:
    if rng.random() < 0.8:
        return {}
    return rng.choice([{"target": 0.6 if task == "labels" else 0.5}, {"patience": 1}, {"gigabytes": 3e-6}])


def draw_memory(rng: Random, clients: int) -> dict[str, Any]:
    memory: dict[str, Any] = {}
    if rng.random() < 0.25:
        memory["precision"] = rng.choice(["bfloat16", "float16"])
    if rng.random() < 0.2:
        memory["keep"] = rng.randint(1, clients)
    if rng.random() < 0.15:
        memory["ram_gb"] = 1e-9
    return memory


class NormalisedSGD(torch.optim.Optimizer):
    """A user's optimiser that normalises each tensor, and so is not elementwise."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    norm = torch.linalg.vector_norm(parameter.grad) + 0.1
                    parameter.data.add_(parameter.grad / norm, alpha=-group["lr"])


def penalised_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A user's loss: cross entropy with a penalty on the outputs, one value per example."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none") + 0.01 * outputs.square().mean(1)


def mean_output(outputs: Tensor, targets: Tensor) -> float:
    """A user's metric."""
    return float(outputs.mean())


mean_output.higher_is_better = True  # type: ignore[attr-defined]
