"""A run in simulated time: discrete events around the real buffer, choice of generators, and admission."""
