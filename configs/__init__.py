"""Profiles: the typed schema, the layered loader, and the TOML files that ship."""
