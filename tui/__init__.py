"""The Textual app: observes the seed, and sends the same requests as the command line.

``model`` (what is known) and ``format``, ``ring_art`` (how it reads) are pure; ``source`` fetches;
``panels``, ``tables`` and ``app`` draw.
"""
