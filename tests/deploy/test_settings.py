"""The configuration of a Flower app: what it accepts, and its deprecated names."""

from pathlib import Path
from typing import Any

import pytest

from keel import KeelError

pytest.importorskip("flwr", reason="flwr is not installed: the extra flower")

from flwr.common.config import get_fused_config_from_dir

from keel.deploy.new import new_federation
from keel.deploy.settings import Federation, read_settings

MINIMAL = {"federation.sites": 3, "federation.out": "-"}


@pytest.mark.parametrize("name", ["fedhbm", "localghbm"])
def test_momentum_is_divided_by_the_actual_number_of_rounds_offline(name: str) -> None:
    spec, _ = read_settings({**MINIMAL, "algorithm.name": name})
    assert spec.algorithm.settings()["tau_i"] == "actual"
    spec, _ = read_settings({**MINIMAL, "algorithm.name": name, "algorithm.tau_i": "expected"})
    assert spec.algorithm.settings()["tau_i"] == "expected"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"federation.sites": 0}, r"federation\.sites"),
        ({"federation.min_replyes": 2}, "did you mean 'min_replies'"),
        ({"federation.max_norm": -1}, "max_norm"),
        ({"federation.least": 2, "federation.min_replies": 2}, "federation.least is the deprecated name"),
        ({"data.name": "digits"}, r"data\.name"),
        ({"model.init": "weights.pt"}, r"model\.init must not be set .*the app's model\(\)"),
        ({"algorithm.name": "centralized"}, "federated algorithm"),
        ({"evaluation.on": "validation"}, r"evaluation\.on"),
        ({"evaluation.deviation": [1]}, r"evaluation\.deviation"),
        ({"engine.name": "ray"}, r"engine\.name"),
        ({"local.lrr": 1.0}, "did you mean 'lr'"),
        ({"server": 3}, "server must be a table"),
    ],
)
def test_invalid_settings_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        read_settings({**MINIMAL, **config})


def test_the_influence_of_a_site_is_bounded_unless_it_is_switched_off() -> None:
    def server(**config: Any) -> tuple[Any, float]:
        spec, _ = read_settings({**MINIMAL, **{key.replace("__", "."): value for key, value in config.items()}})
        return spec.server.clip, spec.server.largest_weight

    assert server() == ("adaptive", 0.5)
    assert server(federation__sites=2) == ("adaptive", 1.0)
    assert server(server__lr=0.5) == ("adaptive", 0.5)
    assert server(server__clip=False, server__largest_weight=1.0) == (None, 1.0)
    assert server(server__clip=2, server__largest_weight=0.2) == (2.0, 0.2)
    assert server(server__mean="median") == ("adaptive", 0.5)
    assert server(server__mean="geometric_median") == ("adaptive", 1 / 3)


def test_every_setting_of_the_federation_can_be_overridden_on_the_command_line(tmp_path: Path) -> None:
    """Flower refuses an override of a key that the app's pyproject.toml does not have."""
    new_federation(tmp_path / "ward", 3, "fedhbm")
    overrides = {
        f"federation.{name}": field.default
        for name, field in Federation.model_fields.items()
        if not field.is_required()
    }
    fused = get_fused_config_from_dir(tmp_path / "ward", {**overrides, "federation.allow_new_keys": True})
    assert read_settings(fused)[1] == Federation(sites=3, out="runs/first", allow_new_keys=True)


def test_a_deprecated_name_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    old = {"least": 2, "timeout": 5, "wait": 7, "largest_norm": 3, "rebind": True}
    _, federation = read_settings({**MINIMAL, **{f"federation.{name}": value for name, value in old.items()}})
    assert (federation.min_replies, federation.timeout_seconds, federation.wait_seconds) == (2, 5.0, 7.0)
    assert (federation.max_norm, federation.allow_new_keys) == (3.0, True)
    assert "federation.least is deprecated; rename it to federation.min_replies" in caplog.text
    assert len(caplog.records) == len(old)
