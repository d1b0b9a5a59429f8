"""Long loops: starts and kills, steps in which nothing may grow, delays. ``scripts/soak --help``."""
