import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from keel import KeelError
from keel.core.adapted import Adapter, adapted, prediction, unadapted
from keel.core.packing import LARGEST, Packing, check_values
from keel.core.stored_inputs import Items, SeveralArrays

DTYPES = [torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2)), min_size=1, max_size=4),
    st.booleans(),
)
def test_unpacking_restores_what_was_packed(parts: list[tuple[torch.dtype, list[int]]], named: bool) -> None:
    tensors = [torch.randint(0, 2, (5, *shape)).to(dtype) for dtype, shape in parts]
    batch = {f"part{i}": tensor for i, tensor in enumerate(tensors)} if named else tuple(tensors)
    packing = Packing.of(batch)
    unpacked = packing.unpack(packing.pack(batch))
    assert type(unpacked) is type(batch)
    values = unpacked.values() if isinstance(unpacked, dict) else unpacked
    for tensor, restored in zip(tensors, values, strict=True):
        assert torch.equal(tensor, restored.to(tensor.dtype))
        assert restored.dtype == (tensor.dtype if tensor.dtype in (torch.bool, torch.float32) else torch.int64)


def test_sizes_that_vary_are_packed_with_the_inputs() -> None:
    def batch(source: int, target: int) -> dict[str, Tensor]:
        return {
            "source": torch.full((2, source), 1),
            "age": torch.rand(2),
            "target": torch.full((2, target), 40),
            "mask": torch.ones(2, target, target, dtype=torch.bool),
        }

    packing = Packing.of(batch(4, 7), variable=True)
    for sizes in (1, 1), (4, 2), (3, 9):
        expected, unpacked = batch(*sizes), packing.unpack(packing.pack(batch(*sizes)))
        assert isinstance(unpacked, dict)
        assert unpacked.keys() == expected.keys()
        for name in ("source", "target", "mask"):
            assert torch.equal(unpacked[name], expected[name])
    assert packing == Packing.of(batch(2, 2), variable=True)


def test_doubles_are_unpacked_as_floats() -> None:
    packing = Packing.of((torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.float16)))
    unpacked = packing.unpack(torch.ones(5, 4))
    assert [part.dtype for part in unpacked] == [torch.float32, torch.float32]  # type: ignore[union-attr]


def test_numbers_that_float32_does_not_hold_are_refused() -> None:
    check_values((torch.tensor([LARGEST]), torch.tensor([-LARGEST])))
    with pytest.raises(KeelError, match=r"input 'ids' must have whole numbers up to 16,777,216 \(got 16777217\)"):
        check_values({"ids": torch.tensor([LARGEST + 1])})
    with pytest.raises(
        KeelError, match=r"inputs of shape \(4,\) differ in their shape from the first inputs \(\(3,\)\)"
    ):
        Packing.of((torch.zeros(2, 3),)).pack((torch.zeros(2, 4),))


def test_arrays_of_unequal_length_are_refused() -> None:
    with pytest.raises(KeelError, match=r"one row per example \(got \[2, 3\] rows\)"):
        SeveralArrays((torch.zeros(2), torch.zeros(3)))


class Two(nn.Module):
    """Takes two inputs and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor, scale: Tensor) -> tuple[Tensor, str]:
        return self.linear(self.embedding(ids).mean(1) * scale[:, None]), "hidden"


def test_an_adapted_module_takes_and_returns_one_tensor_and_is_the_users_again_afterwards() -> None:
    torch.manual_seed(0)
    module, batch = Two(), (torch.randint(5, (4, 6)), torch.rand(4))
    packing = Packing.of(batch)
    one = adapted(module, Adapter(packing))
    assert isinstance(one, Two)
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert torch.equal(one(packing.pack(batch)), module(*batch)[0])
    assert type(module) is Two
    assert type(unadapted(one)) is Two


def test_the_prediction_is_the_tensor_the_logits_or_the_first_element() -> None:
    tensor = torch.ones(2)
    for output in (tensor, {"logits": tensor, "loss": 3}, (tensor, None)):
        assert prediction(output) is tensor
    with pytest.raises(KeelError, match=r"model must return a tensor.*got dict"):
        prediction({"hidden": tensor})


class Lines(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((1 + row % 4,), row), row % 3


def pad(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([line for line, _ in items], True), torch.tensor([label for _, label in items])


def test_items_are_read_when_they_are_gathered() -> None:
    items = Items(Lines(), pad)
    assert items.variable
    inputs, targets = items.gather([2, 7])
    assert inputs.tolist() == [[2, 2, 2, 0], [7, 7, 7, 7]]
    assert targets.tolist() == [2, 1]
    assert items.subset(torch.tensor([7])).gather([0])[0].tolist() == [[7, 7, 7, 7]]
    with pytest.raises(
        KeelError, match=r"cannot be stacked to a minibatch .*; return tensors of equal shape .*collate="
    ):
        Items(Lines()).gather([0, 1, 2])
