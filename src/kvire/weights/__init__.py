"""Weights in the form that their file has: four to eight bits in blocks with scales, or floats.

No torch here, and no model: a matrix has a name, a form and bytes. The kernels of `native/step`
compute with them; `models/packed.py` makes modules of them.

Read first: forms.py.
"""
