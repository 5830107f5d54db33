"""Kernels as PyTorch custom operators, one file each. Import them as `rtc.kernels.<name>`.

This file imports nothing. transformers imports any package named `kernels` that it can find, which
in a Python started in the repository root is this folder: operators registered from here would
then be registered twice, once as `kernels` and once as `rtc.kernels`, and torch raises.
"""
