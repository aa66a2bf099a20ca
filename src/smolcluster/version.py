"""The version, in a module that imports nothing: others may read it while the package is loading."""

__version__ = "0.1.0"
