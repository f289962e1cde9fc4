"""The memory tier: frames in one arena of this process. Read first: tier.py."""
