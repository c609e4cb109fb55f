"""The Textual app: observes the seed, and sends the same requests as the command line.

``model`` and ``chains`` (what is known) and ``format``, ``ring_art``, ``chain_art`` (how it reads) are pure; ``source``
fetches; ``panels``, ``chain_panel``, ``tables`` and ``app`` draw.
"""
