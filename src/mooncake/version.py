"""The version of this distribution; both sides of a connection tell it."""

__version__ = "0.1.0"
