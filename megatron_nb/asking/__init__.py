"""Asking a model many things: who answers, and what was answered, on disk."""
