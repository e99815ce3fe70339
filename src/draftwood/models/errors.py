"""The one error of this package: something in a model folder is not what it should be."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder cannot be used; the message names the file, key or tensor and what was expected."""
