"""Bytes between peers: frames, messages, handshake, connections, link emulation. Knows nothing of rings or models."""
