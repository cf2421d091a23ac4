"""The filter of system calls, run by an interpreter of BPF written from the kernel's documentation."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeasync.isolation.inside import seccomp

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
ALLOW = 0x7FFF0000


def judge(program: bytes, number: int, architecture: int, arguments: tuple[int, ...] = ()) -> int:
    """What the filter returns for a system call."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *words)
    code = list(struct.iter_unpack("=HBBI", program))
    position, loaded = 0, 0
    while True:
        operation, if_true, if_false, value = code[position]
        position += 1
        match operation:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
            case 0x06:
                return value
            case 0x15:
                position += if_true if loaded == value else if_false
            case 0x35:
                position += if_true if loaded >= value else if_false
            case 0x45:
                position += if_true if loaded & value else if_false
            case _:
                raise AssertionError(f"operation {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_list_is_denied_and_the_rest_allowed(machine: str) -> None:
    architecture, column = MACHINES[machine]
    program = seccomp.program(machine)
    numbers = {name: one[column] for name, one in seccomp.DENIED.items() if one[column] is not None}
    assert len(set(numbers.values())) == len(numbers), "two calls cannot have one number"
    for name, number in numbers.items():
        error = 38 if name in ("clone3", "memfd_create", "memfd_secret") else 1
        assert judge(program, number, architecture) == 0x50000 | error
    by_argument = {41, 53, 16, 56, 135} if machine == "x86_64" else {198, 199, 29, 220, 92}
    for number in set(range(467)) - set(numbers.values()) - by_argument:
        assert judge(program, number, architecture) == ALLOW


@given(st.integers(0, 2**64 - 1), st.sampled_from(sorted(MACHINES)))
def test_calls_are_judged_by_their_arguments(argument: int, machine: str) -> None:
    architecture, column = MACHINES[machine]
    program = seccomp.program(machine)
    low = argument & 0xFFFFFFFF
    clone, ioctl, personality, sock = (56, 16, 135, 41) if column == 0 else (220, 29, 92, 198)
    new_namespace = bool(low & 0x7E020000)
    assert (judge(program, clone, architecture, (argument,)) != ALLOW) == new_namespace
    for special in (argument, 1, 2, 10, 16, 40):
        allowed = special & 0xFFFFFFFF in (1, 2, 10)
        assert (judge(program, sock, architecture, (special,)) == ALLOW) == allowed
    for special in (argument, 0x5412, 0x541C, 0x5401):
        denied = special & 0xFFFFFFFF in (0x5412, 0x541C)
        assert (judge(program, ioctl, architecture, (3, special)) != ALLOW) == denied
    assert (judge(program, personality, architecture, (argument,)) == ALLOW) == (low in (0, 0xFFFFFFFF))


@given(st.integers(467, 2**32 - 1))
def test_calls_that_are_not_known_are_not_there(number: int) -> None:
    assert judge(seccomp.program("x86_64"), number, MACHINES["x86_64"][0]) == 0x50000 | 38


@given(st.integers(0, 2**32 - 1).filter(lambda one: one not in (0xC000003E,)), st.integers(0, 500))
def test_calls_of_another_machine_are_not_there(architecture: int, number: int) -> None:
    assert judge(seccomp.program("x86_64"), number, architecture) == 0x50000 | 38


def test_a_machine_without_a_list_is_refused() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compares with the x86_64 headers")
def test_numbers_are_those_of_the_headers() -> None:
    try:
        with open("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("#define __NR_")]
    except FileNotFoundError:
        pytest.skip("the kernel's headers are not installed")
    known = {words[1].removeprefix("__NR_"): int(words[2]) for words in lines}
    for name, (number, _) in seccomp.DENIED.items():
        assert known.get(name, number) == number, name
