"""Models with adapters (peft): what is trained, sent, stored and exported has the size of the adapters."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import keel as keel_api
from keel.core.training_state import TrainingState
from keel.runs.export import export
from keel.runs.folder import RunFolder
from tests.conftest import Called, one_line_error, small_network, uneven_data

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft reads it
SPEC: dict[str, Any] = {
    "rounds": 3,
    "engine": {"name": "serial"},
    "local": {"epochs": 1, "batch": 4, "lr": 0.1},
    "participation": {"rate": 0.5},
    "evaluation": {"every": 1, "last": 1},
}
INPUTS = uneven_data().test.inputs


def lora(module: nn.Module, targets: list[str], head: str, **settings: Any) -> Any:
    """Add adapters of rank 2 to layers of a module, in place. The head is trained too."""
    peft = pytest.importorskip("peft", reason="requires the extra 'lora'")
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=[head], **settings)
    torch.manual_seed(1)
    return peft.get_peft_model(module, config)


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def small_lora(**settings: Any) -> Any:
    return lora(backbone(), ["0", "2"], "4", **settings)


TRAINED = 2 * (5 + 16) + 2 * (16 + 16) + 16 * 3 + 3


def spec_of(algorithm: str, **tables: Any) -> dict[str, Any]:
    return {**SPEC, "algorithm": {"name": algorithm}, **tables}


def run_small(out: Path, algorithm: str = "fedavg", **settings: Any) -> keel_api.Run:
    return keel_api.run(spec_of(algorithm), model=small_lora(), data=uneven_data(), out=out, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> keel_api.Run:
    return run_small(tmp_path_factory.mktemp("adapters") / "run", "ghbm")


@pytest.mark.parametrize(
    ("algorithm", "down", "up"), [("fedavg", 1, 1), ("ghbm", 2, 1), ("fedhbm", 1, 1), ("scaffold", 2, 2)]
)
@pytest.mark.parametrize("engine", ["serial", "cohort"])
def test_a_round_sends_exactly_the_adapters(algorithm: str, down: int, up: int, engine: str, tmp_path: Path) -> None:
    spec = spec_of(algorithm, engine={"name": engine})
    run = keel_api.run(spec, model=small_lora(), data=uneven_data(), out=tmp_path / "run")
    assert run.summary["parameters"] == TRAINED
    for record in run.records:
        clients = len(record["cohort"])
        assert (record["bytes_down"], record["bytes_up"]) == (clients * down * 4 * TRAINED, clients * up * 4 * TRAINED)


@pytest.mark.parametrize("algorithm", ["ghbm", "fedhbm"])
def test_server_state_histories_and_client_states_have_the_size_of_the_adapters(algorithm: str, tmp_path: Path) -> None:
    sizes: list[set[int]] = []

    def hook(record: Any, state: TrainingState, seconds: float) -> None:
        sizes.append({tensor.numel() for tensor in state.server.values()})

    run = run_small(tmp_path / "run", algorithm, hooks=[hook])
    assert sizes == [{TRAINED}] * 3
    states = run.path / "checkpoint/clients.bin"
    rows = states.stat().st_size / (4 * TRAINED) if states.exists() else 0
    assert (0 < rows < 10) if algorithm == "fedhbm" else rows == 0  # 6 clients, some stored twice


def test_frozen_weights_do_not_change(trained: keel_api.Run) -> None:
    before, after = small_lora(), trained.module
    changed = [name for name, p in after.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert changed == [name for name, p in before.named_parameters() if p.requires_grad]


def test_the_model_that_is_passed_and_the_one_that_is_returned_share_nothing(tmp_path: Path) -> None:
    model = small_lora()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = keel_api.run(spec_of("fedavg"), model=model, data=uneven_data(), out=tmp_path / "run")
    run.module.merge_and_unload()  # changes the weights of the backbone in place
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_serial_pool_and_a_resumed_run_have_equal_bits(dropout: float, tmp_path: Path) -> None:
    def run(name: str, engine: str, stop: bool = False) -> keel_api.Run:
        spec = spec_of("fedhbm", engine={"name": engine}, local={**SPEC["local"], "optimizer": "adamw", "lr": 0.01})
        model, out = small_lora(lora_dropout=dropout), tmp_path / name
        return keel_api.run(spec, model=model, data=uneven_data(), out=out, stop=lambda: stop, workers=2)

    serial, interrupted = run("serial", "serial"), run("interrupted", "serial", stop=True)
    assert interrupted.status == "interrupted"
    resumed = keel_api.resume(interrupted.path, model=small_lora(lora_dropout=dropout), data=uneven_data())
    assert {run.summary["model_sha256"] for run in (serial, run("pool", "pool"), resumed)} == {
        serial.summary["model_sha256"]
    }
    with one_line_error("but other initial weights"):
        keel_api.resume(interrupted.path, model=lora(scaled(backbone()), ["0", "2"], "4"), data=uneven_data())


def scaled(module: nn.Module) -> nn.Module:
    """Change only weights that are frozen later."""
    with torch.no_grad():
        module.get_parameter("0.weight").mul_(2)
    return module


def test_the_merged_model_is_the_model_with_adapters(trained: keel_api.Run) -> None:
    merged = deepcopy(trained.module).merge_and_unload()
    assert type(merged) is nn.Sequential
    with torch.no_grad():
        torch.testing.assert_close(merged(INPUTS), trained.module(INPUTS))
        assert not torch.allclose(merged(INPUTS), backbone()(INPUTS), atol=0.1)


def test_only_the_adapters_are_exported_in_the_format_of_peft(
    keel: Callable[..., Called], trained: keel_api.Run, tmp_path: Path
) -> None:
    from peft import PeftModel

    trained.module.save_pretrained(tmp_path / "peft")
    called = keel("export", trained.path, "--adapters", "-o", "out/adapter_model.safetensors")
    assert called.code == 0, called.err
    exported, saved = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "peft"))
    assert exported.keys() == saved.keys()
    assert sum(tensor.numel() for tensor in exported.values()) == TRAINED
    loaded = PeftModel.from_pretrained(backbone(), tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(INPUTS), trained.module(INPUTS))
    assert 'PeftModel.from_pretrained(base, ".")' in (tmp_path / "out/adapter_model.md").read_text()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 2
    assert keel("export", trained.path, "--adapters").out.startswith("model after round 3: adapter_model.safetensors, ")


def test_the_whole_model_is_exported_and_loaded_too(trained: keel_api.Run, tmp_path: Path) -> None:
    exported = export(RunFolder.open(trained.path), tmp_path / "model.safetensors")
    assert load_file(exported.model).keys() == small_lora().state_dict().keys()
    loaded = keel_api.load(trained.path, model=small_lora())
    loaded.module.save_pretrained(tmp_path / "peft")
    with torch.no_grad():
        assert torch.equal(loaded.module(INPUTS), trained.module(INPUTS))


def test_a_model_without_adapters_has_none_to_export(trained: keel_api.Run, tmp_path: Path) -> None:
    run = keel_api.run(spec_of("fedavg"), model=small_network(), data=uneven_data(), out=tmp_path / "run")
    with one_line_error("--adapters requires a model of the library peft (got Sequential); leave it out"):
        export(RunFolder.open(run.path), adapters=True)
    with one_line_error("--out must be called adapter_model.safetensors with --adapters, as peft requires"):
        export(RunFolder.open(trained.path), tmp_path / "mine.safetensors", adapters=True)


def test_runs_next_to_each_other_store_the_backbone_once(trained: keel_api.Run, tmp_path: Path) -> None:
    runs = [run_small(tmp_path / str(number)) for number in range(2)]
    other = keel_api.run(
        SPEC, model=lora(scaled(backbone()), ["0", "2"], "4"), data=uneven_data(), out=tmp_path / "other"
    )
    first, second, different = (run.path / "frozen.safetensors" for run in (*runs, other))
    assert first.samefile(second)
    assert not first.samefile(different)
    assert load_file(second).keys() == {name for name, p in small_lora().named_parameters() if not p.requires_grad}
    assert torch.equal(other.state_dict()["base_model.model.0.base_layer.weight"], 2 * backbone()[0].weight)  # type: ignore[index]


def test_a_backbone_in_half_precision_is_stored_as_it_is(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = backbone().bfloat16(), nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.backbone(inputs.bfloat16()).float())

    model = lora(Half(), ["backbone.0"], "head")
    run = keel_api.run(spec_of("fedavg"), model=model, data=uneven_data(), out=tmp_path / "run")
    weight = keel_api.load(run.path).state_dict()["base_model.model.backbone.2.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, model.get_parameter("base_model.model.backbone.2.weight"))


class Encoder(nn.Module):
    """A transformer of PyTorch's layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding, self.layers = nn.Linear(1, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(inputs[:, :, None])).mean(1))


def test_adapters_of_pytorchs_transformer_layers_are_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, data = lora(Encoder(), ["linear1", "linear2"], "head"), uneven_data()
    run = keel_api.run(spec_of("fedavg"), model=model, data=data, out=tmp_path / "run")
    assert "in evaluation mode nn.TransformerEncoderLayer ignores adapters" in caplog.text
    with torch.no_grad():
        losses = [
            float(nn.functional.cross_entropy(module(INPUTS), data.test.targets))
            for module in (run.module, deepcopy(run.module).train())  # PyTorch ignores adapters in evaluation mode
        ]
    assert run.records[-1]["test_loss"] == pytest.approx(losses[1], rel=1e-5)
    assert run.records[-1]["test_loss"] != pytest.approx(losses[0], rel=1e-3)


def test_a_transformer_of_hugging_face_is_fine_tuned(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="requires the extra 'lora'")
    from peft import PeftModel

    def bert() -> Any:
        torch.manual_seed(0)
        size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=6, num_labels=3, **size)
        return transformers.BertForSequenceClassification(config)

    rng = np.random.default_rng(0)
    tokens = {"input_ids": rng.integers(0, 20, (40, 6)), "attention_mask": np.ones((40, 6), dtype=int)}
    data = keel_api.federate(tokens, tokens["input_ids"][:, 0] % 3, clients=4, test=(tokens, np.arange(40) % 3))
    model = lora(bert(), ["query", "value"], "classifier", task_type="SEQ_CLS", lora_dropout=0.1)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    run = keel_api.run({**SPEC, "rounds": 1}, model=model, data=data, out=tmp_path / "run")
    assert run.records[0]["bytes_up"] == len(run.records[0]["cohort"]) * 4 * trained
    export(RunFolder.open(run.path), tmp_path / "adapters/adapter_model.safetensors", adapters=True)
    loaded = PeftModel.from_pretrained(bert(), tmp_path / "adapters").eval()
    inputs = {name: torch.from_numpy(values) for name, values in tokens.items()}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, run.module(**inputs).logits)


def test_a_model_by_name_is_loaded_with_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="requires the extra 'lora'")
    (tmp_path / "adapted_models.py").write_text(
        "from peft import LoraConfig, get_peft_model\nfrom torch import nn\n\n\n"
        "def net(rank=2):\n"
        "    base = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))\n"
        "    return get_peft_model(base, LoraConfig(r=rank, target_modules=['0'], modules_to_save=['2']))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    table = {"rounds": 1, "model": {"name": "adapted_models:net", "rank": 3}}
    run = keel_api.run(table, out=tmp_path / "run")
    loaded = keel_api.load(run.path).module
    assert run.summary["parameters"] == 3 * (64 + 8) + 90
    assert all(torch.equal(tensor, run.state_dict()[name]) for name, tensor in loaded.state_dict().items())
