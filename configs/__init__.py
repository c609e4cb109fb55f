"""Profiles: the typed schema, the layered loader, and the shipped TOML files."""
