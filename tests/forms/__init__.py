"""Spellings of naive attention with a cache, as different authors write it, each held to eager."""
