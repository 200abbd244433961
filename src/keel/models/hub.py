"""Models of the library `transformers`: their weights and config load with `from_pretrained`."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from keel.models.vision import Logits


@dataclass(frozen=True)
class HubNetwork:
    """A network of transformers, which is a model or a part of one."""

    module: nn.Module
    prefix: str
    """What precedes the network's names in those of the model."""

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        config: Any = self.module.config
        return {**json.loads(config.to_json_string()), "architectures": [self.architecture]}

    @property
    def architecture(self) -> str:
        """The class of transformers that the network is, or that a user's class extends."""
        return next(c.__name__ for c in type(self.module).__mro__ if c.__module__.startswith("transformers."))


def hub_network(module: nn.Module) -> HubNetwork | None:
    """Return the network of transformers that a model is or wraps; None if it has none. Nothing is imported."""
    network, prefix = (module.network, "network.") if isinstance(module, Logits) else (module, "")
    library = sys.modules.get("transformers.modeling_utils")  # transformers itself imports it when it is asked for it
    if library is None or not isinstance(network, library.PreTrainedModel):
        return None
    return HubNetwork(network, prefix)
