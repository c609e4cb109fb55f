"""lm-evaluation-harness, unmodified, against a verifier."""
