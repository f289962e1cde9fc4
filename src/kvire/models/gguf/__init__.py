"""GGUF files: read, and converted once into a transformers directory. Read first: convert.py."""
