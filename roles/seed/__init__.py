"""The seed: tracks members, stores records, coordinates jobs, and answers operators. Never imports torch.

``server.Seed`` makes the objects and gives each what it uses (``jobs.JobPorts``); none of them knows ``Seed``. Begin
with ``jobs.JobController``: one job. ``peers.ConnectedPeer`` is a peer, ``store.SeedStore`` the database.
"""
