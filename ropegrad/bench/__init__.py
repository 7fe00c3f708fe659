"""Measuring on a GPU: how a time is read (`timing`), and what no time can be shorter than (`limits`)."""
