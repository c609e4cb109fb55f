"""The role that owns a model and writes with it, the sooner with drafters."""
