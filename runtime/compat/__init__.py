"""Calls of other tools with the same names and arguments, so that a script changes one import."""
