"""The terminal user interface: observes the cluster, and asks the seed for what a person wants."""
