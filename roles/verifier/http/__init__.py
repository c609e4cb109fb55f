"""The HTTP interfaces to text services, a module for each. ``answer.py`` has what they share: requests, and writing."""
