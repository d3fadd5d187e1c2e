"""Every store keeps the same promises: whole objects, compare-and-swap, order of listing, keys that cannot escape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from crashing_disk import CrashingDisk

from halfbyte.refit.errors import ObjectMissingError, StoreConflictError, StoreError, StoreUnavailableError
from halfbyte.refit.store import FilesystemStore, HttpStore, MemoryStore, ObjectStore, Retrying, Store, open_store
from halfbyte.refit.store.faults import Crash, Fault, FaultyStore


def object_store(path: Path) -> ObjectStore:
    pytest.importorskip("obstore")
    return ObjectStore.from_url("memory:///")


KINDS: dict[str, Callable[[Path], Store]] = {
    "filesystem": lambda path: FilesystemStore(path / "store"),
    "memory": lambda path: MemoryStore(),
    "obstore": object_store,
    "retrying": lambda path: Retrying(FilesystemStore(path / "store")),
    "faulty": lambda path: FaultyStore(MemoryStore()),
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return KINDS[request.param](tmp_path)


def test_objects_come_back_whole(store: Store) -> None:
    store.put("objects/aa", b"hello")
    store.put("objects/aa", memoryview(b"hello again"))
    assert store.get("objects/aa") == b"hello again"
    assert store.get_range("objects/aa", 6, 11) == b"again"
    assert store.get_range("objects/aa", 6, 99) == b"again"
    assert store.get_range("objects/aa", 50, 99) == b""


def test_a_missing_key_is_its_own_error(store: Store) -> None:
    with pytest.raises(ObjectMissingError, match="no such key"):
        store.get("objects/none")
    assert store.read_cell("HEAD") is None
    store.delete("objects/none")


def test_a_value_longer_than_the_limit_is_refused(store: Store) -> None:
    store.put("objects/aa", b"x" * 100)
    assert len(store.get("objects/aa", limit=100)) == 100
    with pytest.raises(StoreError, match="100 bytes, at most 99"):
        store.get("objects/aa", limit=99)


def test_listing_is_sorted_and_stays_under_its_prefix(store: Store) -> None:
    for key in ("a/2", "a/1", "a/b/3", "ab/4", "c"):
        store.put(key, b"1234")
    assert [(e.key, e.size) for e in store.list("a")] == [("a/1", 4), ("a/2", 4), ("a/b/3", 4)]
    assert all(e.modified > 1e9 for e in store.list("a"))
    store.delete("a/1")
    assert [e.key for e in store.list("a")] == ["a/2", "a/b/3"]
    assert list(store.list("nothing")) == []


def test_a_cell_is_swapped_by_whoever_read_it_last(store: Store) -> None:
    first = store.swap("HEAD", b"one", None)
    with pytest.raises(StoreConflictError):
        store.swap("HEAD", b"mine", None)
    second = store.swap("HEAD", b"two", first)
    with pytest.raises(StoreConflictError):
        store.swap("HEAD", b"mine", first)
    cell = store.read_cell("HEAD")
    assert cell is not None
    assert (cell.data, cell.tag) == (b"two", second)


def test_of_many_swaps_at_once_one_wins(store: Store) -> None:
    tag = store.swap("HEAD", b"start", None)
    won, lost, gate = [], [], threading.Barrier(6)

    def contend(number: int) -> None:
        gate.wait()
        try:
            store.swap("HEAD", f"writer {number}".encode(), tag)
            won.append(number)
        except StoreConflictError:
            lost.append(number)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cell = store.read_cell("HEAD")
    assert (len(won), len(lost)) == (1, 5)
    assert cell is not None
    assert cell.data == f"writer {won[0]}".encode()


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../up", "a/../b", "a//b", ".hidden", "a/.lock", "a\\b", "a b", "é", "a\0", "a/"]
)
def test_modelexpress_716_no_key_leaves_the_store(store: Store, key: str) -> None:
    for call in (
        store.get,
        store.read_cell,
        store.delete,
        lambda k: store.put(k, b""),
        lambda k: store.swap(k, b"", None),
    ):
        with pytest.raises(StoreError, match="is not a key"):
            call(key)


def test_stores_by_address(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)).store, FilesystemStore)
    assert isinstance(open_store(f"file://{tmp_path}").store, FilesystemStore)
    assert isinstance(open_store("https://example.org/run").store, HttpStore)
    with pytest.raises(StoreError, match="unknown kind of store 'ftp'"):
        open_store("ftp://example.org/run")


def test_an_object_store_address_that_cannot_be() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(StoreError, match="cannot open the store"):
        open_store("s3://bucket", nonsense="1")


def test_another_process_with_a_lock_that_died_does_not_block(tmp_path: Path) -> None:
    """flock goes with the process: a killed holder leaves the file but no lock."""
    (tmp_path / ".lock").write_text("left by a dead process")
    assert FilesystemStore(tmp_path).swap("HEAD", b"one", None)


def test_killed_at_every_file_operation_a_key_holds_the_old_or_the_new_value(tmp_path: Path) -> None:
    def write(root: Path, disk: CrashingDisk | None) -> None:
        store = FilesystemStore(root, disk=disk)
        found = store.read_cell("HEAD")
        store.put("objects/deep/one", b"new object")
        store.swap("HEAD", b"new head", found and found.tag)

    counting = CrashingDisk()
    write(tmp_path / "count", counting)
    assert counting.count >= 10
    seen = set()
    for k in range(counting.count):
        root = tmp_path / f"at{k}"
        plain = FilesystemStore(root)
        plain.swap("HEAD", b"old head", None)
        disk = CrashingDisk(k)
        try:
            write(root, disk)
        except Crash:
            pass
        else:
            continue  # folders existed already: fewer operations than counted
        head = plain.read_cell("HEAD")
        assert head is not None
        assert head.data in (b"old head", b"new head")
        present = [e.key for e in plain.list("objects")]
        assert present in ([], ["objects/deep/one"])
        if present:
            assert plain.get("objects/deep/one") == b"new object"
        assert head.data == b"old head" or present  # HEAD never runs ahead of its objects
        seen.add((head.data, len(present)))
        write(root, None)
        assert (plain.read_cell("HEAD").data, plain.get("objects/deep/one")) == (b"new head", b"new object")
    assert len(seen) == 2


# ---- patience


def flaky(failures: int, error: int, *, after: bool = False) -> tuple[FaultyStore, Retrying, list[float]]:
    faulty = FaultyStore(MemoryStore(), lambda op: Fault(error, after=after) if op.number < failures else None)
    pauses: list[float] = []
    return faulty, Retrying(faulty, attempts=4, pause=0.1, sleep=pauses.append), pauses


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_unavailable_store_is_asked_again_with_growing_pauses(status: int) -> None:
    _, store, pauses = flaky(3, status)
    store.put("a", b"1")
    assert len(pauses) == 3
    assert all(0.05 * 2**n <= pause <= 0.1 * 2**n for n, pause in enumerate(pauses))
    assert store.get("a") == b"1"


def test_patience_ends() -> None:
    _, store, pauses = flaky(99, 503)
    with pytest.raises(StoreUnavailableError):
        store.get("a")
    assert len(pauses) == 3


@pytest.mark.parametrize("status", [409, 412])
def test_a_conflict_is_not_tried_again(status: int) -> None:
    faulty, store, pauses = flaky(1, status)
    with pytest.raises(StoreConflictError):
        store.swap("HEAD", b"1", None)
    assert pauses == []
    assert [op.kind for op in faulty.operations] == ["swap"]


def test_a_swap_whose_answer_was_lost_counts_as_won() -> None:
    faulty, store, _ = flaky(1, 503, after=True)
    tag = store.swap("HEAD", b"mine", None)
    assert [op.kind for op in faulty.operations] == ["swap", "swap", "read_cell"]
    assert store.swap("HEAD", b"next", tag)


def test_a_swap_whose_answer_was_lost_and_that_another_writer_won_is_lost() -> None:
    memory = MemoryStore()

    def plan(op: object) -> Fault | None:
        if op.number == 0:
            memory.swap("HEAD", b"theirs", None)
            return Fault(503)
        return None

    store = Retrying(FaultyStore(memory, plan), sleep=lambda s: None)
    with pytest.raises(StoreConflictError):
        store.swap("HEAD", b"mine", None)
    assert memory.get("HEAD") == b"theirs"


# ---- HTTP


class Server(ThreadingHTTPServer):
    """Serves a folder; ``breaks`` bodies end early, ``errors`` are answered first, ``ranges`` says whether Range works."""

    breaks = 0
    errors: tuple[int, ...] = ()
    ranges = True
    daemon_threads = True


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.errors:
            error, *rest = self.server.errors
            self.server.errors = tuple(rest)
            self.send_error(error)
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        begin, end, span = 0, len(data), self.headers.get("Range")
        if span and self.server.ranges:
            first, _, last = span.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(len(data), int(last) + 1 if last else len(data))
            if begin >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            self.wfile.write(data[begin : begin + (end - begin) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(data[begin:end])

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Server, HttpStore, FilesystemStore]]:
    server = Server(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server, HttpStore(f"http://127.0.0.1:{server.server_port}", timeout=5), FilesystemStore(tmp_path)
    server.shutdown()
    server.server_close()
    thread.join()


def test_http_reads_what_a_folder_holds(web: tuple[Server, HttpStore, FilesystemStore]) -> None:
    _, http, folder = web
    folder.put("objects/one", bytes(range(256)) * 10)
    folder.swap("HEAD", b"head", None)
    assert http.get("objects/one") == folder.get("objects/one")
    assert http.get_range("objects/one", 10, 20) == bytes(range(10, 20))
    assert http.get_range("objects/one", 2550, 9999) == folder.get("objects/one")[2550:]
    assert http.get_range("objects/one", 99999, 100000) == b""
    assert http.read_cell("HEAD").data == b"head"
    assert http.read_cell("NONE") is None
    with pytest.raises(ObjectMissingError):
        http.get("objects/two")
    with pytest.raises(StoreError, match="at most 100"):
        http.get("objects/one", limit=100)
    with pytest.raises(StoreError, match="can only be read"):
        Retrying(http).put("a", b"")


@pytest.mark.parametrize("ranges", [True, False])
def test_http_goes_on_where_a_body_broke_off(web: tuple[Server, HttpStore, FilesystemStore], ranges: bool) -> None:
    server, http, folder = web
    data = bytes(range(256)) * 1000
    folder.put("objects/one", data)
    server.breaks, server.ranges = 2, ranges
    assert Retrying(http, sleep=lambda s: None).get("objects/one") == data


@pytest.mark.parametrize(
    ("status", "kind"), [(503, StoreUnavailableError), (403, StoreError), (412, StoreConflictError)]
)
def test_http_errors_have_their_classes(
    web: tuple[Server, HttpStore, FilesystemStore], status: int, kind: type[StoreError]
) -> None:
    server, http, folder = web
    folder.put("a", b"1")
    server.errors = (status,)
    with pytest.raises(kind, match=str(status)):
        http.get("a")
    server.errors = (503, 503)
    assert Retrying(http, sleep=lambda s: None).get("a") == b"1"


def test_http_without_a_server_is_unavailable() -> None:
    with pytest.raises(StoreUnavailableError, match="no answer"):
        HttpStore("http://127.0.0.1:1").get("a")


def test_http_refuses_a_server_that_ignores_ranges(web: tuple[Server, HttpStore, FilesystemStore]) -> None:
    server, http, folder = web
    folder.put("a", b"123456")
    server.ranges = False
    with pytest.raises(StoreError, match="does not answer Range"):
        http.get_range("a", 1, 2)


def test_a_store_without_etags_cannot_swap() -> None:
    class Backend:
        def get(self, key: str) -> object:
            class Result:
                meta = {"size": 1, "e_tag": None}  # noqa: RUF012

                def bytes(self) -> bytes:
                    return b"1"

            return Result()

    with pytest.raises(StoreError, match="no ETags"):
        ObjectStore(Backend()).read_cell("HEAD")


def test_abandoned_temporary_files_are_swept(tmp_path: Path) -> None:
    import os

    store = FilesystemStore(tmp_path)
    store.put("objects/a", b"1")
    old, young = tmp_path / "objects/.b.1.2.tmp", tmp_path / "objects/.c.1.3.tmp"
    old.write_bytes(b"half")
    young.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert store.sweep() == 1
    assert (old.exists(), young.exists()) == (False, True)
