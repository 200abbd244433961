"""LoRA and full fine-tuning over clients with two classes each: FedAvg, GHBM and FedHBM with AdamW on the clients.

A small vision transformer is trained on 600 digits in one place, and saved. 90 clients, with ten other digits each, as
negatives, fine-tune it together. The learning rate of each row is the best of one grid on validation examples. Prints
one table. About two minutes on two cores; --quick takes seconds, and its numbers mean nothing.

    python examples/lora.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path
from statistics import mean, stdev

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

import keel
from keel.data.digits import digits

PUBLIC = 600
"""The number of training examples for the backbone; the clients have the others."""


def pretrain(folder: Path, layers: int, epochs: int) -> None:
    """Train the backbone on the public digits, and save it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small: threads would wait for each other
    size = {"hidden_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 96}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **size, **dropout)
    model = ViTForImageClassification(config)
    examples = digits().train[torch.arange(PUBLIC)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(PUBLIC).split(32):
            loss = cross_entropy(model(examples.inputs[rows].view(-1, 1, 8, 8)).logits, examples.targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)


def clients(seed: int) -> keel.FederatedData:
    """The other digits as negatives, two classes per client."""
    data = digits()
    inputs, targets = 1 - data.train.inputs[PUBLIC:].view(-1, 1, 8, 8), data.train.targets[PUBLIC:]
    test = 1 - data.test.inputs.view(-1, 1, 8, 8), data.test.targets
    return keel.federate(inputs, targets, test=test, clients=90, classes_per_client=2, seed=seed)


@torch.no_grad()
def accuracies(model: torch.nn.Module) -> list[float]:
    """The accuracy (%) on the test digits, and on their negatives."""
    images, targets = digits().test.inputs.view(-1, 1, 8, 8), digits().test.targets
    return [100 * float((model(x).logits.argmax(1) == targets).float().mean()) for x in (images, 1 - images)]


def main(quick: bool, out: Path) -> None:
    logging.disable_progress_bar()
    backbone = out / "backbone"
    if not backbone.exists():
        pretrain(backbone, layers=1 if quick else 2, epochs=1 if quick else 60)

    def full(seed: int) -> torch.nn.Module:
        return ViTForImageClassification.from_pretrained(backbone)

    def lora(seed: int) -> torch.nn.Module:
        layers = ["q_proj", "v_proj", "fc1", "fc2"]
        config = LoraConfig(r=4, lora_alpha=8, target_modules=layers, modules_to_save=["classifier"])
        return get_peft_model(full(seed), config)

    spec = {
        "rounds": 2 if quick else 100,
        "local": {"optimizer": "adamw", "epochs": 2, "batch": 5},
        "participation": {"rate": 0.1},
        "evaluation": {"every": 10, "last": 1 if quick else 20},
    }
    print("Backbone: {:.1f} % of the test digits, {:.1f} % of their negatives\n".format(*accuracies(full(0))))
    grid, seeds = ([1e-3], 1) if quick else ([3e-4, 1e-3, 3e-3, 1e-2, 3e-2], 3)
    print("| fine-tuning | method | learning rate | trained parameters | MB per round and client | accuracy (%) |")
    print("|---|---|---|---|---|---|")
    for tuning, model in {"LoRA": lora, "full": full}.items():
        for method in ["fedavg", "ghbm"] if quick else ["fedavg", "ghbm", "fedhbm"]:
            objects = {"model": model, "data": clients, "progress": False}
            folder = out / f"{tuning}-{method}"
            search = keel.sweep({"local.lr": grid}, spec=spec, algorithm=method, out=folder / "search", **objects)
            lr = search.best.fields["local.lr"]
            tuned = {**spec, "local": {**spec["local"], "lr": lr}}
            compared = keel.compare(method, spec=tuned, seeds=seeds, out=folder / "final", **objects)
            print(f"| {tuning} | {method} | {lr:g} | {row([keel.load(path) for path in compared.paths])} |", flush=True)


def row(runs: list[keel.Run]) -> str:
    """The last columns of the table, over the seeds of one method."""
    sent = [(r["bytes_down"] + r["bytes_up"]) / len(r["cohort"]) for run in runs for r in run.records]
    accuracy = [100 * run.accuracy for run in runs]
    spread = f" ± {stdev(accuracy):.1f}" if len(runs) > 1 else ""
    return f"{runs[0].summary['parameters']:,} | {mean(sent) / 1e6:.3f} | {mean(accuracy):.1f}{spread}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out or Path("runs/lora-quick" if arguments.quick else "runs/lora"))
