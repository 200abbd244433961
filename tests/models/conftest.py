"""A small pretrained network."""

from pathlib import Path

import pytest

TINY_VIT = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 7,
}


@pytest.fixture
def tiny_vit(tmp_path: Path) -> Path:
    """Save a vision transformer of two layers for seven classes of 16x16 images, with transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "tiny-vit"
    transformers.ViTForImageClassification(transformers.ViTConfig(**TINY_VIT)).save_pretrained(folder)
    return folder
