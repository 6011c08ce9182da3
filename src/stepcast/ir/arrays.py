"""Names for the numpy array types used across the package."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Int32Array = NDArray[np.int32]
UIntArray = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]
TextArray = NDArray[np.str_]
