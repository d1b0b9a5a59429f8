"""Code broken on purpose, one place at a time, to see which breaks no test notices. ``scripts/mutate --help``."""
