"""The front door: the few names that users import."""

__version__ = "0.1.0"
