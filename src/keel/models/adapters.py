"""Adapters of the library `peft`, in the format that `PeftModel.from_pretrained` loads."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model, without their values."""

    names: dict[str, str]
    """The names of their tensors in the model's state_dict, by the names that peft saves them with."""
    config: dict[str, Any]
    """The content of adapter_config.json."""


def peft_adapters(module: nn.Module) -> Adapters | None:
    """Return the active adapters of a model of peft; None for other models. Nothing is imported.

    None also for methods whose saved tensors are not parameters of the model, such as prefix tuning with a projection.
    """
    library = sys.modules.get("peft")
    if library is None or not isinstance(module, library.PeftModel):
        return None
    names = {tensor.data_ptr(): name for name, tensor in module.state_dict().items()}
    saved = library.get_peft_model_state_dict(module, None, module.active_adapter, save_embedding_layers=False)
    if any(tensor.data_ptr() not in names for tensor in saved.values()):
        return None
    return Adapters({name: names[tensor.data_ptr()] for name, tensor in saved.items()}, _config(module))


def _config(module: Any) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        module.active_peft_config.save_pretrained(folder)
        content = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return {**content, "inference_mode": True}
