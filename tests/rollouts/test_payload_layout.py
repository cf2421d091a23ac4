"""The bytes of one payload: what goes in comes out, and what was damaged is refused."""

import pickle
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from forgeasync.rollouts import (
    ALIGNMENT,
    PayloadRef,
    PayloadTorn,
    group_num_bytes,
    measure,
    read_from,
    write_into,
)

PAYLOAD_ID = "0123456789abcdef-000000000007"


def make_ref(num_bytes: int, checksum: int) -> PayloadRef:
    return PayloadRef(
        payload_id=PAYLOAD_ID,
        host_id="host-a",
        file="/dev/shm/run/file",
        offset=0,
        num_bytes=num_bytes,
        checksum=checksum,
    )


def written(arrays: Mapping[str, np.ndarray], *, before: int = 0) -> tuple[bytearray, PayloadRef]:
    """A payload in memory that was full of the byte ``before``."""
    num_bytes = measure(arrays)
    memory = bytearray([before]) * num_bytes
    checksum = write_into(memoryview(memory), arrays, PAYLOAD_ID)
    return memory, make_ref(num_bytes, checksum)


def rollout() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 1000, 37, dtype=np.int32),
        "logprobs": rng.normal(size=37).astype(np.float32),
        "routed_experts": rng.integers(0, 128, (37, 3, 2), dtype=np.uint8),
    }


DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(),
    npst.byte_string_dtypes(min_len=1),
    npst.unicode_string_dtypes(min_len=1),
    npst.datetime64_dtypes(),
    npst.timedelta64_dtypes(),
)
SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def any_array(draw: st.DrawFn) -> np.ndarray:
    array = draw(npst.arrays(DTYPES, SHAPES))
    layout = draw(st.sampled_from(["as is", "transposed", "strided", "reversed", "fortran"]))
    if layout == "transposed":
        return array.T
    if layout == "fortran":
        return np.asfortranarray(array)
    if layout == "strided" and array.ndim:
        return array[::2]
    if layout == "reversed" and array.ndim:
        return array[..., ::-1]
    return array


@settings(max_examples=150, deadline=None)
@given(arrays=st.dictionaries(st.text(max_size=12), any_array(), max_size=6), copy=st.booleans())
def test_any_arrays_come_back_as_they_went_in(arrays: dict[str, np.ndarray], copy: bool) -> None:
    memory, ref = written(arrays, before=0xAB)
    result = read_from(memoryview(memory), ref, copy=copy)
    assert list(result) == list(arrays)
    for name, array in arrays.items():
        assert result[name].dtype == array.dtype and result[name].shape == array.shape
        # Bytes, because NaN is not equal to itself and -0.0 is equal to 0.0.
        assert result[name].tobytes() == array.tobytes()


def test_bytes_depend_on_the_arrays_alone() -> None:
    assert written(rollout(), before=0)[0] == written(rollout(), before=0xFF)[0]


def test_checksum_is_xxh3_of_all_that_follows_the_header() -> None:
    memory, ref = written(rollout())
    assert ref.checksum == xxhash.xxh3_64_intdigest(bytes(memory[64:]))


def test_arrays_are_aligned_and_views_do_not_copy() -> None:
    raw = np.zeros(4096 + ALIGNMENT, np.uint8)
    memory = memoryview(raw)[-raw.ctypes.data % ALIGNMENT :]
    ref = make_ref(measure(rollout()), write_into(memory, rollout(), PAYLOAD_ID))
    views = read_from(memory, ref, copy=False)
    copies = read_from(memory, ref, copy=True)
    for name, array in views.items():
        assert array.ctypes.data % ALIGNMENT == 0, name
        assert np.shares_memory(array, raw) and not np.shares_memory(copies[name], raw), name
        assert copies[name].flags.owndata, name


def test_longer_memory_is_fine_and_its_rest_untouched() -> None:
    num_bytes = measure(rollout())
    memory = bytearray(b"\x5a" * (num_bytes + 100))
    ref = make_ref(num_bytes, write_into(memoryview(memory), rollout(), PAYLOAD_ID))
    assert memory[num_bytes:] == b"\x5a" * 100
    assert list(read_from(memoryview(memory), ref, copy=True)) == list(rollout())


def test_every_flipped_bit_is_noticed() -> None:
    memory, ref = written(rollout())
    positions = [*range(64), *range(64, len(memory), 7), len(memory) - 1]
    for position in positions:
        damaged = bytearray(memory)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(PayloadTorn) as caught:
            read_from(memoryview(damaged), ref, copy=True)
        assert PAYLOAD_ID in str(caught.value)


@pytest.mark.parametrize(
    ("position", "field"),
    [
        (0, "magic"),
        (8, "format version"),
        (16, "payload id"),
        (48, "body length"),
        (56, "checksum in the header"),
        (64, "checksum of the body"),
    ],
)
def test_error_names_the_field_and_both_values(position: int, field: str) -> None:
    memory, ref = written(rollout())
    memory[position] ^= 1
    with pytest.raises(PayloadTorn, match=f"{field} should be .* but is "):
        read_from(memoryview(memory), ref, copy=False)


def test_short_memory_is_torn() -> None:
    memory, ref = written(rollout())
    for length in (0, 10, 64, len(memory) - 1):
        with pytest.raises(PayloadTorn, match=f"should be {len(memory)} but is {length}"):
            read_from(memoryview(memory)[:length], ref, copy=True)


def test_another_payload_in_the_same_place_is_torn() -> None:
    memory, ref = written(rollout())
    with pytest.raises(PayloadTorn, match="payload id"):
        read_from(memoryview(memory), replace(ref, payload_id=PAYLOAD_ID[:-1] + "8"), copy=True)


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "i4"), ("b", "f4")])])
def test_dtypes_that_would_not_come_back_are_refused(dtype: np.dtype) -> None:
    with pytest.raises(ValueError, match="'bad' has dtype"):
        measure({"good": np.zeros(1), "bad": np.zeros(3, dtype)})


def test_references_are_small_and_survive_pickling() -> None:
    ref = make_ref(12_600_000, 2**64 - 1)
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert len(pickle.dumps(ref)) < 400
    other = replace(ref, offset=4096, num_bytes=1)
    assert group_num_bytes([other]) == 8192
