"""The store's own HTTP server: what a folder holds, ranges of it, and nothing to strangers."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.refit.errors import ObjectMissingError, StoreError
from halfbyte.refit.store import FilesystemStore, HttpStore
from halfbyte.refit.store.server import StoreServer

DATA = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreServer, FilesystemStore, HttpStore]]:
    root = tmp_path_factory.mktemp("served")
    (root / "secret").write_bytes(b"not of the store")
    folder = FilesystemStore(root / "store")
    folder.put("objects/one", DATA)
    with StoreServer(folder) as server:
        yield server, folder, HttpStore(server.address, headers=server.headers, timeout=20)


def test_objects_and_cells_are_those_of_the_folder(served: tuple[StoreServer, FilesystemStore, HttpStore]) -> None:
    server, folder, http = served
    before = server.bytes_sent
    assert http.get("objects/one") == DATA
    assert server.bytes_sent - before == len(DATA)
    assert http.read_cell("HEAD") is None
    tag = folder.swap("HEAD", b"one", None)
    assert http.read_cell("HEAD").data == b"one"  # type: ignore[union-attr]
    folder.swap("HEAD", b"two", tag)
    assert http.read_cell("HEAD").data == b"two"  # type: ignore[union-attr]
    with pytest.raises(ObjectMissingError):
        http.get("objects/two")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.integers(0, 2100), st.integers(0, 2100))
def test_ranges_are_slices(served: tuple[StoreServer, FilesystemStore, HttpStore], begin: int, end: int) -> None:
    assert served[2].get_range("objects/one", begin, end) == DATA[begin : max(begin, end)]


@pytest.mark.parametrize("path", ["../secret", "%2e%2e/secret", "objects/../../secret", ".lock", "", "objects"])
def test_nothing_but_keys_of_the_store_is_given_out(
    served: tuple[StoreServer, FilesystemStore, HttpStore], path: str
) -> None:
    server = served[0]
    request = urllib.request.Request(f"{server.address}/{path}", headers=server.headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    assert caught.value.code in (404, 503)


def test_strangers_get_nothing(served: tuple[StoreServer, FilesystemStore, HttpStore]) -> None:
    server = served[0]
    for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer \xe9"}):
        with pytest.raises(StoreError, match="401"):
            HttpStore(server.address, headers=headers).get("objects/one")


def test_an_address_that_is_not_here_is_an_error_with_the_address() -> None:
    with pytest.raises(StoreError, match="cannot listen"):
        StoreServer(FilesystemStore(Path("unused")), host="203.0.113.7")
