"""The worker role: registers, forms the ring, trains, leaves cleanly."""
