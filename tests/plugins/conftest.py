"""Tests of plugins that are coroutines run as those of boxes do."""

from tests.isolation.conftest import pytest_pyfunc_call as pytest_pyfunc_call
