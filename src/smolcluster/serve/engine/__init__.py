"""Layers in stages, one front before them: which batch runs where, and the next token."""
