"""Attention over the paged cache, against a softmax written out in float64."""
