"""What can go wrong in a refit, each with its own class: the reader of an error decides by class whether to retry.

:class:`StoreUnavailableError` and :class:`StoreConflictError` say that the same call may succeed later; everything else
needs a person or another plan. After any of them the target still serves the version it served before.
"""

from __future__ import annotations

from halfbyte.errors import RefitError

__all__ = [
    "CorruptError",
    "FencedError",
    "LayoutError",
    "ObjectMissingError",
    "RefitError",
    "RewoundError",
    "StoreConflictError",
    "StoreError",
    "StoreUnavailableError",
    "TargetError",
    "WrongBaseError",
]


class CorruptError(RefitError):
    """Bytes that are not what their digest, header or bounds say: damaged, truncated or hostile."""


class WrongBaseError(RefitError):
    """A delta whose base is not what the target holds."""


class LayoutError(RefitError):
    """Names, dtypes or shapes that do not fit: a tensor without its base, a tie without a policy, an unsafe name."""


class RewoundError(RefitError):
    """The store shows an older version, or another content for a version already taken: replayed or replaced."""


class TargetError(RefitError):
    """The target (engine, module, folder) failed to take a refit and was returned to its old version."""


class StoreError(RefitError):
    """A store that refused an operation."""


class ObjectMissingError(StoreError):
    """A key that the store does not hold (404)."""


class StoreConflictError(StoreError):
    """A compare-and-swap that lost: the cell was not what the caller had read (409, 412)."""


class FencedError(StoreConflictError):
    """Another publisher has taken over this run; this one must not publish any more."""


class StoreUnavailableError(StoreError):
    """The store does not answer now (429, 500, 502, 503, 504, a broken connection); the same call may succeed later."""
