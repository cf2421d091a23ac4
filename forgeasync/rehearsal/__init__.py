"""A run's own topology with a tiny model: how a config is made small, and what the small run has shown."""
