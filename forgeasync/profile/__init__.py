"""How long the parts of a run take on one machine: data, its file, and what lies between measured points."""
