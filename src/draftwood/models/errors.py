"""The errors of this package: a model folder, or a conversation, is not what it should be."""

from __future__ import annotations


class ModelError(ValueError):
    """A model folder cannot be used; the message names the file, key or tensor and what was expected."""


class ChatError(ValueError):
    """A conversation cannot be put into a model's chat layout; the message names the message and field, or the template."""
