"""Predicts memory and step time of a sharded training before it is run."""
