"""Shared by the tests: tiny models written in the published formats, and drafters that follow a script."""
