"""The simulator: the real seed and real workers on virtual time, in one process, with reproducible faults."""
