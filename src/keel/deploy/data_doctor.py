"""The part of `keel deploy doctor` that runs a site's own loader. It prints counts and types, never a value."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from keel.core.examples import Examples, FederatedData, Partition
from keel.deploy.app_source import approved_source
from keel.deploy.check import load_app, read_app
from keel.deploy.site import app_parts
from keel.deploy.site_data import Loader, Model, check_labels
from keel.errors import KeelError
from keel.runs.findings import Finding

MIN_PER_CLASS = 5
"""Fewer examples of a class at a site give a warning."""


def site_data_findings(folder: Path, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Run the loader of the approved app, or of the folder's own app if none is approved, and check its data."""
    with approved_source(folder) as approved:
        if approved is None:
            text = "no app is approved; these checks ran the folder's own files, which the node does not"
            yield Finding("app", "warning", text)
        else:
            yield Finding("app", "ok", "the checks of the data ran the approved app")
        source = approved or folder
        _, components = read_app(source)
        client = load_app(source, components["clientapp"], ClientApp)
        if client not in app_parts:
            raise KeelError(f"{components['clientapp']} must be made by keel.deploy.client_app")
        model, loader, _ = app_parts[client]
        yield from data_findings(model, loader, node)


def data_findings(model: Model, loader: Loader, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Load a site's data, and check shapes, types, missing values and labels against the model's outputs."""
    try:
        data = loader(node)
    except Exception as error:  # the user's loader may raise anything; its text may quote an example
        yield Finding("loader", "failed", f"raises {type(error).__name__}; run it in Python at this site to see why")
        return
    if not isinstance(data, tuple) or len(data) != 2:
        yield Finding("loader", "warning", f"returns a {type(data).__name__}; only pairs of arrays are checked here")
        return
    train, test = data if isinstance(data[0], tuple) else (data, None)
    yield Finding("loader", "ok", "test examples are held out" if test is not None else "no test examples")
    outputs: int | None = None
    for name, arrays in ("training", train), *((("test", test),) if test is not None else ()):
        inputs, labels = (value.numpy() if isinstance(value, Tensor) else np.asarray(value) for value in arrays)
        yield _sizes(name, inputs, labels)
        yield _missing(name, inputs)
        if outputs is None:
            outputs, finding = _outputs(model, inputs)
            yield finding
        if labels.dtype.kind in "iub" and outputs is not None:
            yield _labels(name, labels, outputs)


def _sizes(name: str, inputs: np.ndarray, labels: np.ndarray) -> Finding:
    shape, check = " x ".join(map(str, inputs.shape[1:])) or "one number", f"{name} examples"
    text = f"{len(inputs)} of shape {shape}, {inputs.dtype}; labels {labels.dtype}"
    if len(inputs) != len(labels) or not len(inputs):
        return Finding(check, "failed", f"{text}; {len(labels)} labels: there must be one for each example")
    if inputs.dtype.kind not in "fiub":
        return Finding(check, "failed", f"{text}; inputs must be numbers: convert them in the loader")
    return Finding(check, "ok", text)


def _missing(name: str, inputs: np.ndarray) -> Finding:
    check = f"{name} missing values"
    if inputs.dtype.kind != "f":
        return Finding(check, "ok", "none")
    missing = ~np.isfinite(inputs.reshape(len(inputs), -1))
    if not missing.any():
        return Finding(check, "ok", "none")
    columns = np.flatnonzero(missing.any(axis=0))
    first = ", ".join(map(str, columns[:10]))
    return Finding(
        check,
        "failed",
        f"{int(missing.sum())} in {int(missing.any(axis=1).sum())} examples, columns {first}; fill or remove them",
    )


def _outputs(model: Model, inputs: np.ndarray) -> tuple[int | None, Finding]:
    module: nn.Module = model().eval()
    try:
        with torch.no_grad():
            outputs = module(torch.as_tensor(np.asarray(inputs[:1], dtype=np.float32)))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        text = f"does not accept one example of shape {list(inputs.shape[1:])} ({type(error).__name__})"
        return None, Finding("model", "failed", f"{text}; change the model or the loader")
    return int(outputs.shape[-1]), Finding("model", "ok", f"accepts an example, {outputs.shape[-1]} outputs")


def _labels(name: str, labels: np.ndarray, outputs: int) -> Finding:
    check, targets = f"{name} labels", torch.as_tensor(labels.astype(np.int64))
    part = Examples(targets, targets)
    try:
        check_labels(FederatedData("site", part, part, Partition.of([np.arange(len(part))]), outputs))
    except KeelError:  # its text quotes labels
        outside = int((labels >= outputs).sum()) + (int((labels < 0).sum()) if labels.ndim == 1 else 0)
        text = f"{outside} are not from 0 to {outputs - 1}, the classes of the model; change the loader"
        return Finding(check, "failed", text)
    counts = np.bincount(targets[targets >= 0], minlength=outputs)  # padding of sequences is negative
    text = "examples per class: " + ", ".join(map(str, counts.tolist()[:20])) + ", ..." * (outputs > 20)
    if counts.min() < MIN_PER_CLASS:
        return Finding(check, "warning", f"{text}; a class has fewer than {MIN_PER_CLASS}")
    return Finding(check, "ok", text)
