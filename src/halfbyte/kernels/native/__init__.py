"""The native implementation: wrappers round the extension module ``halfbyte.kernels._native``.

Importing this package raises ImportError where the extension was not built; the registry then offers the reference alone.
"""

from halfbyte.kernels import _native  # noqa: F401
