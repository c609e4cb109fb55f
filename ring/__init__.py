"""Who is in the ring and what they do together: views, collectives, the step transaction. Knows nothing of models."""
