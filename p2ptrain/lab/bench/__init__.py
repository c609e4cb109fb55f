"""``p2ptrain bench``: measures speed, always beside a rival in the same run.

Each benchmark has a module. ``runner`` starts members as processes and sends them orders; ``member`` runs in each of
them. ``sockets`` measures the limit of this machine. ``report`` has the results.
Only members load torch.
"""
