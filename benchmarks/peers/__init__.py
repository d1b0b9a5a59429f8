"""What ``benchmarks.compare`` sets beside hp_sharding: contenders that train the same model with PyTorch.

PyTorch is no dependency: ``environment`` puts it into an environment of its own, and only processes that run there
import ``torch_model`` and ``torch_training``.
"""
