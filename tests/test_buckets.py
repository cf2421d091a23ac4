"""Buckets carry every weight once, under its own names, within the size limit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.weights.buckets import NamedWeight, plan_buckets, stack, unstack

shapes = st.sampled_from([(4,), (2, 3), (3, 2), (4, 2, 2)])


@given(
    weights=st.lists(st.tuples(shapes, st.booleans()), max_size=20),
    max_bytes=st.integers(1, 200),
)
def test_every_weight_comes_back_bit_for_bit(
    weights: list[tuple[tuple[int, ...], bool]], max_bytes: int
) -> None:
    named = []
    for index, (shape, is_experts) in enumerate(weights):
        names = tuple(f"w{index}.{e}" for e in range(shape[0])) if is_experts else (f"w{index}",)
        named.append(NamedWeight(names=names, tensor=torch.randn(shape)))
    returned: dict[str, torch.Tensor] = {}
    for bucket, members in plan_buckets(named, max_bytes=max_bytes):
        stacked = stack(members, torch.float32)
        assert len(members) == 1 or stacked.numel() * 4 <= max_bytes
        for name, tensor in unstack(bucket, stacked):
            assert name not in returned
            returned[name] = tensor
    assert set(returned) == {name for weight in named for name in weight.names}
    for weight in named:
        for index, name in enumerate(weight.names):
            expected = weight.tensor if len(weight.names) == 1 else weight.tensor[index]
            assert torch.equal(returned[name].reshape(expected.shape), expected)


def test_a_bucket_is_a_copy_in_the_generators_dtype() -> None:
    weight = NamedWeight(names=("w",), tensor=torch.ones(2))
    stacked = stack([weight], torch.bfloat16)
    weight.tensor.zero_()
    assert stacked.dtype is torch.bfloat16
    assert stacked.tolist() == [[1.0, 1.0]], "the optimizer's next step must not reach a published version"
