"""Settings that are chosen by measurement: ``comm_buffer_size_MB="auto"`` and ``prefetch_depth="auto"``.

search      which of a row of candidates is the best: arithmetic on measured steps. No Paddle
tuner       measures steps, agrees on them with all ranks, and puts candidates in force between two steps
"""

from .search import Measured
from .tuner import Choice, Tuner, begin

__all__ = ["Choice", "Measured", "Tuner", "begin"]
