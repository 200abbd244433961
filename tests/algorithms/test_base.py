"""The defaults of the protocol, and details of the built-in algorithms."""

from importlib import import_module
from pkgutil import iter_modules
from typing import ClassVar

import pytest
import torch

import keel
from keel import algorithms
from keel.algorithms import REGISTRY, Algorithm, check_functions, make_algorithm
from keel.algorithms.base import Context, Report, in_rounds
from keel.algorithms.fedavg import FedAvg
from keel.errors import KeelError


def test_secure_aggregation_is_off_for_an_algorithm_that_does_not_declare_mean_suffices() -> None:
    @keel.hyperparameters
    class Silent(keel.Algorithm):
        name, title, paper = "silent", "Silent", "none"

    assert Silent.mean_suffices is False


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
def test_counters_of_built_in_algorithms_are_integers(cls: type[Algorithm]) -> None:
    theta = torch.zeros(7)
    assert {value.dtype for value in cls().init_client(theta).values() if value.shape != theta.shape} <= {torch.int64}


def test_tau_is_one_period_and_at_least_one_round() -> None:
    ghbm = make_algorithm("ghbm")
    assert [in_rounds("period", period) for period in (1.0, 0.3, 9.6)] == [1, 1, 10]
    assert (ghbm.history(9.6), make_algorithm("ghbm", tau=4).history(9.6), FedAvg().history(9.6)) == (10, 4, 0)


def test_yogi_keeps_a_second_moment_that_equals_the_square() -> None:
    yogi = make_algorithm("fedyogi", epsilon=2.0)
    server = yogi.init_server(torch.zeros(2))  # v starts at 4
    report = Report({"delta": torch.tensor([2.0, -2.0])}, 1.0, 1)
    ctx = Context(round=1, clients=1, cohort=1, share=1.0, period=1.0, lr=0.1, server_lr=1.0)
    assert yogi.aggregate(server, [report], ctx)["v"].tolist() == [4.0, 4.0]


def test_the_names_that_are_read_from_the_source_are_those_of_the_classes() -> None:
    modules = [import_module(f"keel.algorithms.{entry.name}") for entry in iter_modules(algorithms.__path__)]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    named = [cls for cls in classes if issubclass(cls, Algorithm) and "name" in vars(cls)]
    assert dict(REGISTRY) == {cls.name: cls for cls in named}
    assert list(REGISTRY) == sorted(REGISTRY)


def test_a_wrong_signature_or_a_missing_decorator_is_one_line() -> None:
    class WithoutContext(Algorithm):
        def direction(self, w, gradient, received, state):  # type: ignore[no-untyped-def, override]
            return gradient(w)

    class WithoutDecorator(Algorithm):
        beta: float = 0.9

    class Declared(Algorithm):
        name: ClassVar[str] = "declared"

    with pytest.raises(KeelError, match=r"WithoutContext.direction must take \(self, w, gradient, .*, ctx\)"):
        check_functions(WithoutContext)
    with pytest.raises(KeelError, match=r"decorate the class WithoutDecorator with @keel.hyperparameters"):
        check_functions(WithoutDecorator)
    check_functions(Declared)
    for cls in REGISTRY.values():
        check_functions(cls)
