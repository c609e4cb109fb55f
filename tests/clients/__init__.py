"""Other people's programs against the HTTP interfaces of a verifier."""
