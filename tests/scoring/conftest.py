"""Tests that are coroutine functions."""

from tests.controller.conftest import pytest_pyfunc_call as pytest_pyfunc_call
