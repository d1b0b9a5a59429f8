"""Long loops: starts that must not fail, and steps in which nothing may grow. ``scripts/soak --help``."""
