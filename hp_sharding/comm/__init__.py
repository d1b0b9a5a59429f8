"""Collectives. ``create_communicators`` picks the implementation for the ranks and the device at hand."""
