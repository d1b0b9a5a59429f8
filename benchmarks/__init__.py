"""Measurements; README.md says what each is for and how it is run."""
