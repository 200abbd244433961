"""The policy of a site, `site.toml`: which requests the site answers. It is enforced at the site and fails closed."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from keel.algorithms.base import Context
from keel.config.schema import CUSTOM, Spec
from keel.deploy.site_errors import PolicyRefusal
from keel.errors import KeelError, explain

POLICY, APP = "policy", "app"
"""Settings that `keel deploy node` adds to the node's configuration: the policy's file, and the hash of the app."""

ROUND_FIELDS = [name for name in Context.__dataclass_fields__ if name != "sizes"]
"""The numbers of a request that describe its round."""
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Policy(BaseModel):
    """The fields of `site.toml`. Those without a default must be set."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    study: Annotated[str, Field(min_length=1)]
    """ID of the study; `federation.study` of the server must be equal."""
    expires: date
    """Last day on which the site takes part (UTC)."""
    algorithms: Annotated[list[str], Field(min_length=1)]
    """Algorithms that a request may name."""
    references: list[str] = []
    """Objects "module:name" that a request may name, which the site then imports."""
    min_batch: Count
    """Smallest minibatch, the last one of an epoch included."""
    min_steps: Count
    """Smallest number of local steps of a round."""
    min_noise: Positive | None = None
    """Smallest noise multiplier of `privacy.mechanism = "example"`, whose random minibatches may be smaller than
    `min_batch`, down to one example. Without it the mechanism is refused."""
    min_examples: Count
    """Number of training examples below which the site does not take part."""
    max_rounds: Count
    """Largest number of rounds of a training."""
    max_reports: Count
    """Largest number of reports and evaluations that leave the site over all trainings and repeated rounds."""
    max_lr: Positive | None = None
    """Largest local learning rate, in the settings and in each round."""
    evaluation: bool
    """Whether the site evaluates models on its test examples."""
    min_test_examples: Count
    """Number of test examples below which the site does not evaluate."""
    clip_norm: Positive | None = None
    """Norm to which the site clips a report."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the Gaussian noise on each element of a report, as a multiple of `clip_norm`."""
    timeout_seconds: Positive
    """Time after which the site ends a request."""
    max_memory_mb: Count
    """Largest data segment of the client process."""
    max_reply_mb: Positive
    """Largest size of the tensors in a reply."""
    retention_days: Annotated[int, Field(ge=0)]
    """Days after which `keel deploy clean` removes client state that no round has used."""

    @model_validator(mode="after")
    def _noise_is_relative_to_clip_norm(self) -> "Policy":
        if self.noise and self.clip_norm is None:
            raise ValueError("noise requires clip_norm")
        return self

    def check_names(self, table: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Check the study, the expiry date and all names of a request, before anything that it names is imported."""
        today = datetime.now(UTC).date()
        if today > self.expires:
            raise PolicyRefusal("expires", f"the policy has expired on {self.expires}")
        if request.get("study") != self.study:
            raise PolicyRefusal("study", f"must be the study of the request (got {request.get('study')!r})")
        for section in "algorithm", "data", "model":
            if not isinstance(table.get(section, {}), Mapping):
                raise KeelError(f"{section} of the request must be a table (got {table[section]!r})")
        algorithm = table.get("algorithm", {}).get("name")
        if algorithm not in self.algorithms:
            raise PolicyRefusal("algorithms", f"the request names {algorithm!r}; allowed: {', '.join(self.algorithms)}")
        for text in _texts(table):
            if ":" in text and text not in self.references:
                raise PolicyRefusal("references", f"the request names {text!r}, which the site would import")
        for section in "data", "model":
            if table.get(section, {}).get("name") != CUSTOM or "init" in table[section]:
                raise PolicyRefusal("references", f"the request's {section} is not the one of the approved app")

    def check_settings(self, spec: Spec, request: Mapping[str, Any]) -> None:
        """Check the settings of a request, before the data are loaded."""
        local, round = spec.local, request.get("round", 0)
        if type(round) is not int:
            raise KeelError(f"round of the request must be an integer (got {round!r})")
        self._check_random_minibatches(spec)
        rounds = max(spec.rounds, round)
        if local.batch < self.min_batch:
            raise PolicyRefusal("min_batch", f"is {self.min_batch}, but local.batch is {local.batch}")
        if local.steps is not None and local.steps < self.min_steps:
            raise PolicyRefusal("min_steps", f"is {self.min_steps}, but local.steps is {local.steps}")
        if rounds > self.max_rounds:
            raise PolicyRefusal("max_rounds", f"is {self.max_rounds}, but the request is for {rounds} rounds")
        self._check_lr("local.lr", local.lr)
        if spec.evaluation.on != "test" or spec.evaluation.clients is not None:
            raise PolicyRefusal("evaluation", "the request is to evaluate on other examples than the test examples")

    def _check_random_minibatches(self, spec: Spec) -> None:
        """Check the noise of DP-SGD: the server knows the seed, and so when a minibatch has one example."""
        if spec.privacy is None or spec.privacy.mechanism != "example":
            return
        if self.min_noise is None:
            raise PolicyRefusal("min_noise", "is not set, but privacy.mechanism is 'example' (random minibatches)")
        if (noise := spec.privacy.noise or 0.0) < self.min_noise:
            raise PolicyRefusal("min_noise", f"is {self.min_noise:g}, but privacy.noise is {noise:g}")

    def check_evaluation(self) -> None:
        """Check that the site evaluates models, before the data are loaded."""
        if not self.evaluation:
            raise PolicyRefusal("evaluation", "is false, but the request is for an evaluation")

    def check_round(self, request: Mapping[str, Any]) -> None:
        """Check the numbers of a request that the local training of a round uses, before the data are loaded."""
        for name in ROUND_FIELDS:
            value = request.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise KeelError(f"{name} of the request must be a finite number (got {value!r})")
        if request["round"] < 1:
            raise KeelError(f"round of the request must be at least 1 (got {request['round']!r})")
        self._check_lr("the learning rate of the round", request["lr"])

    def _check_lr(self, name: str, lr: float) -> None:
        if self.max_lr is not None and not 0 <= lr <= self.max_lr:
            raise PolicyRefusal("max_lr", f"is {self.max_lr:g}, but {name} is {lr:g}")

    def check_examples(self, examples: int, sizes: Sequence[int]) -> None:
        """Check the size of the site's data, and the sizes of the minibatches that follow from it, one for each step.

        The last minibatch of an epoch may be smaller than `local.batch`.
        """
        if examples < self.min_examples:
            raise PolicyRefusal("min_examples", f"is {self.min_examples}, but the site has {examples} examples")
        if min(sizes) < self.min_batch:
            raise PolicyRefusal(
                "min_batch",
                f"is {self.min_batch}, but with {examples} examples one minibatch has {min(sizes)}; "
                "set local.drop_last = true",
            )
        if len(sizes) < self.min_steps:
            raise PolicyRefusal(
                "min_steps", f"is {self.min_steps}, but the request amounts to {len(sizes)} local steps"
            )

    def check_test_examples(self, examples: int) -> None:
        if examples < self.min_test_examples:
            raise PolicyRefusal(
                "min_test_examples", f"is {self.min_test_examples}, but the site has {examples} test examples"
            )

    def check_reply(self, size: int) -> None:
        """Check the number of bytes of the tensors in a reply."""
        if size > self.max_reply_mb * 2**20:
            raise PolicyRefusal("max_reply_mb", f"is {self.max_reply_mb:g}, but the reply has {size} bytes")


def read_policy(file: Path) -> Policy:
    """Read a site's policy.

    Raises:
        KeelError: The file cannot be read, a field is missing or unknown, or has a wrong value.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        return Policy.model_validate({k: float(v) if k in FLOATS and type(v) is int else v for k, v in table.items()})
    except OSError as error:
        raise KeelError(f"policy {str(file)!r} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise KeelError(f"policy {str(file)!r}: {explain(error)[:300]}") from None
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise KeelError(f"policy {str(file)!r} is not a TOML file ({str(error)[:300]})") from None


FLOATS = ("max_lr", "min_noise", "clip_norm", "noise", "timeout_seconds", "max_reply_mb")
"""Fields for which an integer is accepted too."""


def policy_of(node: Mapping[str, Any]) -> Policy | None:
    """Return the policy that a node's configuration names; None only if it is set to the empty text.

    Raises:
        PolicyRefusal: There is no policy, or it is invalid.
    """
    value = node.get(POLICY)
    if value == "":
        return None
    if not isinstance(value, str):
        raise PolicyRefusal("file", "the node has no policy; start it with keel deploy node")
    try:
        return read_policy(Path(value))
    except KeelError as error:
        raise PolicyRefusal("file", str(error)) from None


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a table, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
