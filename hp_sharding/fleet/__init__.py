"""The strategy flag and the fleet-shaped face."""
