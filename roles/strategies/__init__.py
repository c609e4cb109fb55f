"""Ways to train: what happens between two commits of the step transaction. One file a strategy."""
