"""Inputs of a graph by the names that the user's code has for them."""

from __future__ import annotations

import re


def source_name(name: str) -> str:
    """Dynamo's ``L['self']._modules['caches']._modules['0']._buffers['k']`` as ``caches.0.k``."""
    name = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", name)
    name = re.sub(r"^[LG]\['([^']+)'\]", r"\1", name)
    name = re.sub(r"^kwargs\['([^']+)'\]", r"\1", name)
    return name.removeprefix("self.")


def readable(text: str) -> str:
    """A sentence with its sources named as in the user's code."""
    parts = r"(?:\['[^']+'\]|\._(?:modules|buffers|parameters)\['[^']+'\])*"
    return re.sub(rf"\b[LG]\['[^']+'\]{parts}", lambda m: source_name(m.group()), text)
