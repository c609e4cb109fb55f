"""The verifier: owns a model and writes text with it, faster with drafters."""
