"""The seed: tracks members, stores records, coordinates jobs, and answers operators. Never imports torch."""
