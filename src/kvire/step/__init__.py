"""The native step: a model's own forward, recorded once, run by the C++ kernels in one call.

transformers' class stays the only source of the formula. `record.py` runs it once on tensors
without numbers, `lower.py` turns the recorded graph into operations on rows, `fuse.py` joins what
has a kernel of its own, `program.py` orders them into stages, and `model.py` is the engine's model.
`oracle.py` runs the same operations in plain torch.

Read first: rows.py.
"""
