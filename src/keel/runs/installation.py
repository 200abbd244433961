"""What is installed: the packages that Keel requires, its extras, and where data sets are. It imports no PyTorch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from shutil import disk_usage

from packaging.requirements import Requirement

from keel.runs.findings import Finding

DISTRIBUTION = "keel-fl"
EXTRAS = {
    "vision": "MobileNetV2, ViT-B/16, pretrained weights, folders of images",
    "text": "the data set Stack Overflow, which is in HDF5 files",
    "table": "tables in Parquet files",
    "datasets": "data sets of Hugging Face and flwr-datasets",
    "frame": "results as pandas DataFrames",
    "sweep": "searches with Optuna",
    "lora": "LoRA and other adapters of peft",
    "ray": "the engine ray: the machines of a cluster",
    "flower": "federations: keel deploy",
    "tensorboard": "the tracker TensorBoard",
    "wandb": "the tracker Weights & Biases",
    "mlflow": "the tracker MLflow",
}
"""What each extra is for."""


@dataclass(frozen=True)
class Extra:
    """An optional part of Keel, and what is missing for it."""

    name: str
    purpose: str
    problems: list[str]

    @property
    def installed(self) -> bool:
        return not self.problems

    @property
    def command(self) -> str:
        return f"pip install '{DISTRIBUTION}[{self.name}]'"


def package_findings() -> Iterator[Finding]:
    """Check that each required package is installed in a version that Keel supports."""
    problems = _problems("")
    text = "; ".join(problems) + f"; run pip install {DISTRIBUTION}" if problems else "all required packages"
    yield Finding("packages", "failed" if problems else "ok", text)


def extras() -> list[Extra]:
    """Return the extras, and what is missing for each."""
    return [Extra(name, purpose, _problems(name)) for name, purpose in EXTRAS.items()]


def folder_finding(folder: Path, name: str) -> Finding:
    """Check that files can be written to a folder, or that it can be created."""
    existing = next(part for part in [folder, *folder.parents] if part.exists())
    if not existing.is_dir():
        return Finding(name, "failed", f"{existing} is not a folder")
    if not os.access(existing, os.W_OK):
        return Finding(name, "warning", f"{folder} is read-only")
    created = "" if folder == existing else " (created when it is needed)"
    return Finding(name, "ok", f"{folder}{created}, {disk_usage(existing).free / 1e9:.1f} GB available")


def _problems(extra: str) -> list[str]:
    """Return what is missing for an extra, or for Keel itself."""
    found = []
    for requirement in map(Requirement, requires(DISTRIBUTION) or []):
        required_by = [name for name in ("", extra) if _applies(requirement, name)]
        if required_by[:1] != [extra]:
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    return found


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
