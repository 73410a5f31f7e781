"""Trajectory Balance with Asynchrony: trainer, searchers and tools, coupled by a bucket alone."""

__version__ = "0.1.0"
