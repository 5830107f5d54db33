"""Capture and replay of whole steps."""
