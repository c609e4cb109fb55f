"""The worker role: trains jobs, holds parts of split models, sends states, models and checkpoints."""
