"""Graph passes: each file is one rewrite; ``pipeline`` holds their order."""

from rtc.passes.pipeline import PIPELINE, names

__all__ = ["PIPELINE", "names"]
