"""What the simulator says of a run while it goes on, and how that compares with what it does."""
