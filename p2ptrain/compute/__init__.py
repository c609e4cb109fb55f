"""The only home of torch: models, data, training, checkpoints, generation."""
