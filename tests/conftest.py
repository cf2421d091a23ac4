"""Settings of all tests."""

from hypothesis import settings

# On a busy machine any example may take long: tests judge behaviour, not time.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
