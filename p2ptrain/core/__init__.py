"""The floor of the house: errors, the injected world, ids, telemetry. Standard library only."""
