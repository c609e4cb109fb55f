"""The seed: knows who is there, keeps the record, coordinates jobs, answers operators. Never imports torch."""
