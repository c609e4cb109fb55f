"""Models, data, training, checkpoints, generation: the only package that imports torch."""
