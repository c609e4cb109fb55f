"""The command line: the composition root, and the only place that picks uvloop and reads the environment."""
