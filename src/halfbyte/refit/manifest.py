"""The manifest: what a version is, as canonical JSON of which there is exactly one form.

A subscriber believes nothing but the manifest's digest (or its signature) and follows the hashes from there. Parsing is
strict: unknown or missing keys, other types, other orders or spellings are errors, so nothing can be read as "unchanged".
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from halfbyte.errors import RefitError
from halfbyte.refit.arrays import TensorInfo

__all__ = ["Kind", "Manifest", "ObjectRef", "Operation", "Signer", "TensorChange", "canonical", "check_name"]

#: What a version holds: all tensors; the change from its parent; nothing new; the change over several versions.
Kind = Literal["full", "delta", "noop", "skip"]
#: What happens to a tensor: a codec delta, a new tensor, one less, or all its bytes anew (of the same or another shape).
Operation = Literal["patch", "add", "remove", "replace"]

_FORMAT = "halfbyte-refit-1"
_HEX = re.compile(r"[0-9a-f]{64}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LONGEST_NAME = 1024  # bytes
_MOST = 2**53  # larger integers are not safe in JSON


def canonical(value: Any) -> bytes:
    """The one JSON form: sorted keys, no blanks, ASCII with escapes, no floats that are not finite."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def check_name(name: Any, where: str) -> str:
    """A tensor's name as given.

    Raises:
        RefitError: empty, too long, with control characters, or reserved. (Names never become paths: a slash is fine.)
    """
    if (
        not isinstance(name, str)
        or not name
        or name == "__metadata__"
        or not name.isprintable()
        or len(name.encode(errors="replace")) > _LONGEST_NAME
    ):
        raise RefitError(f"unusable tensor name {str(name)[:80]!r}", where=where)
    return name


@dataclass(frozen=True)
class ObjectRef:
    """An object by content hash (hex SHA-256) and size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class TensorChange:
    """One tensor's row.

    ``object``: number of the object that holds the bytes, under the tensor's name; None for ``remove``. ``info`` is the
    tensor after the change (before it, for ``remove``). ``changed``: elements whose bits differ.
    """

    info: TensorInfo
    operation: Operation
    object: int | None
    changed: int = 0


@dataclass(frozen=True)
class Signer:
    """HMAC-SHA256 with a shared key: a manifest comes from somebody who has the key."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise RefitError(f"a signing key of {len(self.key)} bytes", expected="16 random bytes or more")

    def sign(self, body: bytes) -> str:
        """Hex of the code over the manifest without its signature."""
        return hmac.new(self.key, b"halfbyte-refit\0" + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """One version.

    ``run`` and ``epoch`` name the line of versions (an epoch ends when a publisher starts over); ``parent`` is the version
    that a delta starts from, with its digest and None for a full one; ``schema`` and ``state`` are the digests after the
    change (``state.py``). ``block``: elements of a codec block. ``aliases``: tied names -> the name that is stored.
    ``statistics``: numbers for people. ``created``: seconds since 1970, for people.
    """

    run: str
    epoch: int
    version: int
    kind: Kind
    schema: str
    state: str
    block: int
    parent: int | None = None
    parent_digest: str | None = None
    objects: tuple[ObjectRef, ...] = ()
    tensors: tuple[TensorChange, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    statistics: Mapping[str, int | float] = field(default_factory=dict)
    created: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def body(self) -> bytes:
        """Canonical JSON without a signature: what is hashed and signed."""
        return canonical(_to_json(self))

    def digest(self) -> str:
        """Hex SHA-256 of :meth:`body`; signing does not change it."""
        return hashlib.sha256(self.body()).hexdigest()

    def to_bytes(self, signer: Signer | None = None) -> bytes:
        """The file: the body, with the signature as one more key."""
        table = _to_json(self)
        if signer is not None:
            table["signature"] = signer.sign(self.body())
        return canonical(table)

    @classmethod
    def from_bytes(
        cls, data: bytes, *, digest: str | None = None, signer: Signer | None = None, where: str = "manifest"
    ) -> Manifest:
        """Read untrusted bytes.

        Arguments:
            digest: what the manifest's digest must be, where known.
            signer: then a valid signature is demanded.
        Raises:
            RefitError: not exactly a manifest, another digest, no or a wrong signature.
        """
        table = _parse(data, where)
        signature = table.pop("signature", None)
        if signer is not None:
            given = signature.encode() if isinstance(signature, str) else b""
            right = hmac.compare_digest(signer.sign(canonical(table)).encode(), given)
            if not right:
                raise RefitError(
                    "the manifest has no signature" if signature is None else "the manifest's signature is wrong",
                    where=where,
                    fix="compare the publisher's key with this one; do not load these weights",
                )
        try:
            manifest = _from_json(table, where)
        except (KeyError, TypeError) as error:
            raise _bad(where, f"{type(error).__name__} {str(error)[:80]}") from error
        if canonical(_to_json(manifest)) != canonical(table):
            raise _bad(where, "a value of another type than the format's")
        if digest is not None and manifest.digest() != digest:
            raise RefitError(
                f"the manifest's digest is {manifest.digest()}", where=where, expected=digest, fix="fetch it again"
            )
        return manifest


def _check(manifest: Manifest) -> None:
    where = f"manifest of version {manifest.version!r}"
    numbers = [manifest.epoch, manifest.version, manifest.block, *(ref.size for ref in manifest.objects)]
    numbers += [change.changed for change in manifest.tensors] + ([] if manifest.parent is None else [manifest.parent])
    if any(type(number) is not int or not 0 <= number < _MOST for number in numbers):
        raise _bad(where, "a number that is not a natural one below 2**53")
    if not isinstance(manifest.run, str) or not _RUN.fullmatch(manifest.run):
        raise _bad(where, f"run {str(manifest.run)[:80]!r}", expected="letters, digits, dots, dashes, underscores")
    digests = [manifest.schema, manifest.state, *(ref.digest for ref in manifest.objects)]
    digests += [] if manifest.parent_digest is None else [manifest.parent_digest]
    if any(not isinstance(digest, str) or not _HEX.fullmatch(digest) for digest in digests):
        raise _bad(where, "a digest that is not 64 lower-case hex digits")
    if manifest.kind not in get_args(Kind):
        raise _bad(where, f"kind {str(manifest.kind)[:80]!r}", expected=", ".join(get_args(Kind)))
    if manifest.block & (manifest.block - 1) or not 2 <= manifest.block <= 1 << 20:
        raise _bad(where, f"blocks of {manifest.block} elements")
    _check_parent(manifest, where)
    _check_tensors(manifest, where)
    for name, value in manifest.statistics.items():
        if not isinstance(name, str) or type(value) not in (int, float) or value != value or abs(value) > 1e300:
            raise _bad(where, f"statistic {str(name)[:80]!r}")
    if type(manifest.created) not in (int, float) or not 0 <= manifest.created < 1e12:
        raise _bad(where, f"created {str(manifest.created)[:80]}")


def _check_parent(manifest: Manifest, where: str) -> None:
    has_parent = manifest.parent is not None
    if has_parent != (manifest.parent_digest is not None) or has_parent != (manifest.kind != "full"):
        raise _bad(
            where, f"a {manifest.kind} version with parent {manifest.parent} and digest {manifest.parent_digest}"
        )
    if manifest.parent is not None and (
        manifest.parent >= manifest.version or (manifest.kind != "skip" and manifest.parent != manifest.version - 1)
    ):
        raise _bad(where, f"a {manifest.kind} of version {manifest.version} from {manifest.parent}")


def _check_tensors(manifest: Manifest, where: str) -> None:
    names = [check_name(change.info.name, where) for change in manifest.tensors]
    if names != sorted(set(names)):
        raise _bad(where, "tensors that are not in name order, or twice")
    if (
        (manifest.kind == "noop") != (not manifest.tensors)
        and manifest.kind != "skip"
        and (manifest.kind, names) != ("full", [])
    ):
        raise _bad(
            where, f"a {manifest.kind} version with {len(names)} tensors", expected="none in a noop, some in a delta"
        )
    used = {change.object for change in manifest.tensors} - {None}
    if used != set(range(len(manifest.objects))) or len({ref.digest for ref in manifest.objects}) != len(
        manifest.objects
    ):
        raise _bad(where, "objects that no tensor is in, are listed twice or not at all")
    for change in manifest.tensors:
        if change.operation not in get_args(Operation) or (manifest.kind == "full" and change.operation != "add"):
            raise _bad(where, f"operation {str(change.operation)[:80]!r} of tensor {change.info.name!r}")
        if (change.operation == "remove") != (change.object is None) or change.changed > change.info.elements:
            raise _bad(where, f"tensor {change.info.name!r}: object or changed elements do not fit {change.operation}")
    for alias, name in manifest.aliases.items():
        check_name(alias, where)
        check_name(name, where)
        if alias in names or name in manifest.aliases:
            raise _bad(where, f"alias {alias!r} of {name!r} is itself a tensor or of an alias")


def _to_json(manifest: Manifest) -> dict[str, Any]:
    table = {item.name: getattr(manifest, item.name) for item in fields(manifest)}
    table["objects"] = [[ref.digest, ref.size] for ref in manifest.objects]
    table["tensors"] = [
        [change.info.name, change.info.dtype, list(change.info.shape), change.operation, change.object, change.changed]
        for change in manifest.tensors
    ]
    return table | {
        "format": _FORMAT,
        "aliases": dict(manifest.aliases),
        "statistics": dict(manifest.statistics),
        "created": float(manifest.created),
    }


def _from_json(table: dict[str, Any], where: str) -> Manifest:
    if table.get("format") != _FORMAT:
        raise _bad(where, f"format {str(table.get('format'))[:80]!r}", expected=_FORMAT)
    expected = {item.name for item in fields(Manifest)} | {"format"}
    if table.keys() != expected:
        raise _bad(where, f"keys {sorted(table.keys() ^ expected)[:5]} are missing or unknown")
    shapes = {"objects": list, "tensors": list, "aliases": dict, "statistics": dict}
    for key, kind in shapes.items():
        if not isinstance(table[key], kind):
            raise _bad(where, f"{key} is no {kind.__name__}")
    for key, length in (("objects", 2), ("tensors", 6)):
        if any(not isinstance(row, list) or len(row) != length for row in table[key]):
            raise _bad(where, f"a row of {key} that is not {length} values")
    rows = {key: value for key, value in table.items() if key not in ("format", "objects", "tensors")}
    changes = []
    for name, dtype, shape, operation, number, changed in table["tensors"]:
        if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > 64:
            raise _bad(where, f"tensor {str(name)[:80]!r} with dtype {str(dtype)[:20]!r}")
        if type(number) not in (int, type(None)):
            raise _bad(where, f"tensor {name[:80]!r} in object {str(number)[:20]!r}")
        changes.append(TensorChange(TensorInfo(name, dtype, tuple(shape)), operation, number, changed))
    return Manifest(**rows, objects=tuple(ObjectRef(*row) for row in table["objects"]), tensors=tuple(changes))


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        table = json.loads(data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
        again = canonical(table)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"not canonical JSON ({str(error)[:80]})") from error
    if not isinstance(table, dict) or again != data:
        raise _bad(where, "not canonical JSON")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _no_constant(text: str) -> Any:
    raise ValueError(text)


def _bad(where: str, what: str, **more: str) -> RefitError:
    return RefitError(f"unusable manifest: {what}", where=where, **more)
