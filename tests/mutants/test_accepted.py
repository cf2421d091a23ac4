"""accepted.toml: every entry fits a change that can be made."""

from fnmatch import fnmatch

import pytest

from tests.mutants.run import ACCEPTED, Acceptance, Mutant, idle, mutants_of, read_acceptances


def test_an_entry_that_fits_no_change_is_found() -> None:
    mutant = Mutant(name="f__mutmut_1", module="a.py", function="f", old="x = 1", new="x = 2")
    fits = Acceptance(module="a.py", function="f", reason="")
    renamed = Acceptance(module="a.py", function="g", reason="")
    changed = Acceptance(module="*", pattern="=> x = 3", reason="")
    elsewhere = Acceptance(module="b.py", function="f", reason="")
    assert idle([fits, renamed, changed, elsewhere], {"a.py": [mutant]}) == [renamed, changed]


@pytest.mark.exhaustive
def test_every_entry_fits_a_change() -> None:
    acceptances = read_acceptances(ACCEPTED)
    modules = {one.module for one in acceptances if not fnmatch("*", one.module)}
    assert idle(acceptances, {module: mutants_of(module) for module in sorted(modules)}) == []
