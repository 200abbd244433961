"""What a run folder records of its model: the names of its tensors, and the tensors that no checkpoint holds."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from keel.core.flat_model import FlatModel
from keel.core.state_layout import StateLayout, state_layout
from keel.models.adapters import Adapters, peft_adapters
from keel.models.hub import hub_network
from keel.runs.build import Training
from keel.runs.checked_tensors import DTYPES, safetensors_parts
from keel.runs.files import write_once, write_synced

FILE, FROZEN, INITIAL = "model.json", "frozen.safetensors", "initial.safetensors"


@dataclass(frozen=True)
class ModelRecord:
    """The names of a model's tensors, its class, and its tensors that training does not change."""

    class_name: str
    layout: StateLayout
    frozen: Mapping[str, Tensor]
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    """All initial tensors of a run that started from a file (`model.init`), which may be gone when it is resumed."""
    hub: dict[str, Any] | None = None
    """For a network of transformers: its config, and the prefix of its names."""
    adapters: Adapters | None = None
    """For a model of peft."""

    @classmethod
    def of(cls, module: nn.Module, evaluated: FlatModel, *, from_file: bool) -> "ModelRecord":
        """Record a model before its training.

        Args:
            module: The module that training starts from.
            evaluated: The same as the model that the run returns, whose BatchNorm layers may have no statistics.
            from_file: Whether its weights came from a file.
        """
        layout, network = state_layout(evaluated), hub_network(module)
        initial = {name: tensor.cpu() for name, tensor in module.state_dict().items()} if from_file else {}
        hub = None if network is None else {"prefix": network.prefix, "config": network.config}
        frozen, adapters = layout.frozen(evaluated.module), peft_adapters(module)
        return cls(type(module).__name__, layout, frozen, initial, hub, adapters)

    @property
    def size(self) -> int:
        """The bytes of the tensors on disk."""
        tensors = [*self.frozen.values(), *self.initial.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(self, folder: Path) -> None:
        """Write the record into a run folder. Tensors that another run next to it has too are stored once."""
        content: dict[str, Any] = {"class": self.class_name, "tensors": self.layout.to_json()}
        content |= {} if self.hub is None else {"transformers": self.hub}
        content |= {} if self.adapters is None else {"peft": asdict(self.adapters)}
        write_synced(folder / FILE, [(json.dumps(content) + "\n").encode()])
        for name, tensors in (FROZEN, self.frozen), (INITIAL, self.initial):
            storable = {key: tensor for key, tensor in tensors.items() if tensor.dtype in DTYPES}
            if storable:
                write_once(folder / name, [*safetensors_parts(storable, {})], sorted(folder.parent.glob(f"*/{name}")))

    @classmethod
    def read(cls, folder: Path) -> "ModelRecord | None":
        """Read the record without the values of tensors; None in folders of earlier versions."""
        if not (folder / FILE).is_file():
            return None
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        layout = StateLayout.from_json(content["tensors"])
        adapters = Adapters(**content["peft"]) if "peft" in content else None
        return cls(content["class"], layout, {}, hub=content.get("transformers"), adapters=adapters)


def model_record(training: Training) -> ModelRecord:
    """Record the model of a run before its first round."""
    evaluated = training.loop.engine.evaluator.model
    return ModelRecord.of(training.loop.task.module, evaluated, from_file=training.spec.model.init is not None)
