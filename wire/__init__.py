"""Bytes between peers: frames, messages, handshake, connections, link emulation. Imports nothing of rings or models."""
