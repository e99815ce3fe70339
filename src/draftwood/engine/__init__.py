"""Requests in, tokens out: the engine around the round."""
