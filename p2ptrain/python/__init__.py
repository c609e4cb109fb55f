"""What ``import p2ptrain`` offers beside the clients and clusters of ``p2ptrain.cluster``."""
