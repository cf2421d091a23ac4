"""Runs the listed tests and reports on each: ``run_tests.py <request>``.

A line of the report is the request's nonce and an object. The nonce is in no argument, variable or file once
the code under test is imported, and reports go to a descriptor other than that of standard output. That code
still shares this process; docs/coding.md describes what remains possible.
"""

import json
import os
import sys
import traceback


def main(request_path):
    with open(request_path) as file:
        request = json.load(file)
    os.unlink(request_path)
    report = reporter(os.dup(1), request.pop("nonce"))
    # The output of tests goes to the log.
    os.dup2(2, 1)
    # An isolated Python leaves these paths out; the config and the record name them.
    sys.path[:0] = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    run = prepare_pytest() if request["runner"] == "pytest" else prepare_unittest()
    guard = Guard()
    folder = os.getcwd()
    sys.path[:0] = [os.path.normpath(os.path.join(folder, one)) for one in request["python_path"]]
    status = run(request["target"], frozenset(request["tests"]), report, guard)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    report(end=True, status=int(status))
    # Skips exit handlers of the repository's code.
    os._exit(0)


def reporter(channel, nonce):
    dumps, write = json.dumps, os.write

    def report(**what):
        line = (f"\n{nonce} {dumps(what)}\n").encode()
        while line:
            line = line[write(channel, line) :]

    return report


class Guard:
    """Detects replaced functions of the test runner."""

    prefixes = ("unittest", "pytest", "_pytest", "pluggy")

    def __init__(self):
        self.hold()

    def hold(self):
        """Record the current modules and functions as the expected ones."""
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if module is not None and name.partition(".")[0] in self.prefixes
        }
        holders = {id(module): module for module in self.modules.values()}
        for module in self.modules.values():
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__.partition(".")[0] in self.prefixes:
                    holders[id(value)] = value
        self.held = [
            (holder, name, value, code_of(value))
            for holder in holders.values()
            for name, value in vars(holder).items()
            if callable(value) or isinstance(value, (classmethod, staticmethod, property))
        ]

    def replaced(self):
        """Return the name of a replaced module or function; None if nothing was replaced."""
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                return name
        for holder, name, value, code in self.held:
            if vars(holder).get(name) is not value or code_of(value) is not code:
                return f"{holder.__name__}.{name}"
        return None


def code_of(value):
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    return getattr(function, "__code__", None)


def prepare_unittest():
    import unittest

    loader = unittest.TestLoader()

    def run(target, tests, report, guard):
        class Result(unittest.TestResult):
            def note(self, test, outcome, problem=""):
                name = test.id()
                sys.stderr.write(f"{name} {outcome}\n{problem}")
                if name in tests:
                    report(test=name, outcome=outcome, replaced=guard.replaced())

            def addSuccess(self, test):
                super().addSuccess(test)
                self.note(test, "passed")

            def addFailure(self, test, error):
                super().addFailure(test, error)
                self.note(test, "failed", self.failures[-1][1])

            def addError(self, test, error):
                super().addError(test, error)
                self.note(test, "failed", self.errors[-1][1])

            def addSubTest(self, test, subtest, error):
                super().addSubTest(test, subtest, error)
                if error is not None:
                    self.note(test, "failed", "".join(traceback.format_exception(*error)))

            def addSkip(self, test, reason):
                super().addSkip(test, reason)
                self.note(test, "skipped", f"{reason}\n")

            def addExpectedFailure(self, test, error):
                super().addExpectedFailure(test, error)
                self.note(test, "failed as expected")

            def addUnexpectedSuccess(self, test):
                super().addUnexpectedSuccess(test)
                self.note(test, "passed unexpectedly")

        suite = unittest.TestSuite(loader.loadTestsFromName(name) for name in sorted(tests))
        suite.run(Result())
        return 0

    return run


def prepare_pytest():
    import pytest

    def run(target, tests, report, guard):
        phases = {}
        send = report

        class Plugin:
            def pytest_load_initial_conftests(self):
                # pytest's own plugins and others, first of all ``_pytest.legacypath``, change it before this.
                # pytest reads conftest files later, because its own hook was registered before this one.
                guard.hold()

            @pytest.hookimpl(trylast=True)
            def pytest_collection_modifyitems(self, items):
                items[:] = [item for item in items if item.nodeid in tests]

            def pytest_runtest_logreport(self, report):
                done = phases.setdefault(report.nodeid, {})
                is_expected = hasattr(report, "wasxfail")
                done[report.when] = "failed as expected" if is_expected else report.outcome
                if report.when == "teardown":
                    others = [one for one in done.values() if one != "passed"]
                    whole = len(done) == 3 and not others
                    outcome = "passed" if whole else (others or ["incomplete"])[0]
                    send(test=report.nodeid, outcome=outcome, replaced=guard.replaced())

        arguments = ["--rootdir=.", "-p", "no:cacheprovider", "--color=no", "--tb=short", "-rA", target]
        return pytest.main(arguments, plugins=[Plugin()])

    return run


main(sys.argv[1])
