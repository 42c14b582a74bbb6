"""The page over HTTP: who may see it, what it answers, and what it leaves behind."""

from __future__ import annotations

import gzip
import http.client
import os
import re
import socket
import stat
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec
import pytest

import gradwire
from gradwire.errors import UsageError
from gradwire.seeing import jobs
from gradwire.seeing.history import View
from gradwire.seeing.jobs import JobPage
from gradwire.seeing.page_server import MOST_CONNECTIONS
from gradwire.testing import cluster
from tests.gates import GATES
from tests.leftovers import eventually

SECONDS = 20.0


@gradwire.expose
def wait_at_gate(gate):
    assert GATES[gate].wait(SECONDS)


@gradwire.expose
def call_there(worker, gate):
    return gradwire.rpc_sync(worker, wait_at_gate, args=(gate,))


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "gradwire"


@pytest.fixture
def workers():
    with cluster(3) as made:
        yield made


@pytest.fixture
def page(workers):
    return workers[0].run(gradwire.serve_page)


@contextmanager
def answered(page, path="", headers=None, method="GET", seconds=SECONDS):
    address = urlsplit(page.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=seconds)
    try:
        connection.request(method, address.path + path, headers=headers or {})
        yield connection.getresponse()
    finally:
        connection.close()


def body(page, path=""):
    with answered(page, path) as answer:
        assert answer.status == 200
        return answer.read().decode()


def view_of(page):
    return msgspec.json.decode(body(page, "status.json"), type=View)


def events(answer):
    """The views of a stream of events."""
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line[6:], type=View)


def page_threads():
    return [t.name for t in threading.enumerate() if re.fullmatch(r"gradwire \w+ page.*", t.name)]


# -- what it shows


@pytest.mark.slow
def test_the_view_names_all_workers_and_who_waits_for_whom(workers, page, gate):
    future = workers[0].run(gradwire.rpc_async, "w1", call_there, ("w2", gate))
    found = []

    def waits():
        found[:] = view_of(page).waits
        return len(found) == 2

    assert eventually(waits, SECONDS)
    known = view_of(page)
    GATES[gate].set()
    future.wait()

    assert [row.name for row in known.workers] == ["w0", "w1", "w2"]
    assert {(wait.worker, wait.peer, wait.ends_at) for wait in found} == {
        ("w0", "w1", ("w2",)),
        ("w1", "w2", ("w2",)),
    }
    assert "call_there" in next(wait.what for wait in found if wait.worker == "w0")
    assert known.cycles == []


@pytest.mark.slow
def test_a_viewer_gets_views_twice_a_second(page):
    with answered(page, "events") as answer:
        assert answer.getheader("Content-Type").startswith("text/event-stream")
        stream = events(answer)
        views = [next(stream) for _ in range(3)]

    assert [len(view.workers) for view in views] == [3, 3, 3]
    assert {row.doing for row in views[-1].workers} == {"runs"}


def test_stacks_of_a_worker_are_shown_on_demand(workers, page, gate):
    future = workers[0].run(gradwire.rpc_async, "w1", wait_at_gate, (gate,))
    assert eventually(lambda: "in wait_at_gate" in body(page, "stacks?worker=w1"), SECONDS)

    assert "wait_at_gate" in body(page, "stacks?worker=w0")
    assert body(page, "stacks?worker=nobody") == "There is no worker nobody."
    assert body(page, "stacks") == "There is no worker ."
    GATES[gate].set()
    future.wait()


def test_stacks_of_a_lost_worker_say_why_there_are_none(workers, page):
    workers[2].worker.close()

    assert body(page, "stacks?worker=w2").startswith("w2 cannot be asked: ")


@pytest.mark.slow
def test_nobody_is_asked_while_nobody_watches(workers, page):
    watcher = page._watcher
    view_of(page)
    with watcher._lock:
        watcher._watched_until = 0.0
        watcher._changed.notify_all()
    assert eventually(lambda: not watcher._encoded, SECONDS)

    served = workers[1].worker.agent._connections.readers.all
    before = sum(reader.reads for reader in served())
    threading.Event().wait(3 * watcher.period)

    assert sum(reader.reads for reader in served()) == before


# -- to whom


@pytest.mark.parametrize("path", ["", "status.json", "events", "stacks?worker=w1", "nothing"])
@pytest.mark.parametrize("token", ["", "x", "wrong/", "../", "%00/", "%E9/"])
def test_who_does_not_know_the_token_sees_nothing(page, path, token):
    address = urlsplit(page.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=SECONDS)
    connection.request("GET", f"/{token}{path}")
    answer = connection.getresponse()

    assert (answer.status, answer.read()) == (403, b"not allowed\n")
    connection.close()


@pytest.mark.parametrize(
    "line",
    [b"GET /\xe9/ HTTP/1.0", b"GET //[ HTTP/1.0", b"GET", b"\x16\x03\x01", b"GET / HTTP/9.9", b""],
)
def test_what_no_browser_sends_is_refused(page, line, capfd):
    with socket.create_connection(("127.0.0.1", urlsplit(page.url).port), SECONDS) as stranger:
        stranger.sendall(line + b"\r\nHost: x\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        told = b"".join(iter(lambda: stranger.recv(4096), b""))

    assert b"200" not in told.partition(b"\r\n")[0]
    assert b"<title>gradwire" not in told
    assert "Traceback" not in capfd.readouterr().err


def test_a_token_is_long_and_new_each_time(workers):
    pages = [workers[n].run(gradwire.serve_page) for n in range(3)]
    tokens = {urlsplit(page.url).path.strip("/") for page in pages}

    assert len(tokens) == 3
    assert all(len(token) >= 32 for token in tokens)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:PORT", 200),
        ("localhost:PORT", 200),
        ("LOCALHOST:PORT", 200),
        ("evil.example:PORT", 403),
        ("127.0.0.1", 403),
        ("127.0.0.1:1", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_pointed_here_is_refused(page, host, status):
    port = urlsplit(page.url).port

    with answered(page, headers={"Host": host.replace("PORT", str(port))}) as answer:
        assert answer.status == status


def test_two_hosts_are_refused(page):
    address = urlsplit(page.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=SECONDS)
    connection.putrequest("GET", address.path)
    connection.putheader("Host", "evil.example")
    connection.endheaders()

    assert connection.getresponse().status == 403
    connection.close()


def test_nothing_can_be_changed(page):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        with answered(page, method=method) as answer:
            assert answer.status == 501


def test_it_listens_on_this_machine_only(page):
    assert page._server.server_address[0] == "127.0.0.1"
    assert page.url.startswith("http://127.0.0.1:")


def test_no_other_site_may_read_frame_or_extend_it(page):
    with answered(page) as answer:
        headers = dict(answer.getheaders())
        answer.read()

    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_the_page_loads_nothing_from_elsewhere(page):
    text = body(page)
    links = set(re.findall(r"https?://[^\s\"'<]+", text))

    assert links == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert "<script src" not in text
    assert not re.search(r"\son\w+=|innerHTML|\sstyle=", text), "the policy would block it"


def test_its_address_is_not_in_its_name_or_in_the_output(workers, capfd):
    page = workers[0].run(gradwire.serve_page)
    token = urlsplit(page.url).path.strip("/")

    assert token not in repr(page)
    assert token not in "".join(capfd.readouterr())


def test_too_many_connections_are_refused_and_the_others_go_on(page):
    address = urlsplit(page.url)
    many = [
        http.client.HTTPConnection(address.hostname, address.port, timeout=SECONDS)
        for _ in range(MOST_CONNECTIONS + 5)
    ]
    for connection in many:
        connection.connect()
    assert eventually(lambda: len(page._server._connections) == MOST_CONNECTIONS, SECONDS)
    with pytest.raises((OSError, http.client.HTTPException)):
        body(page)
    for connection in many:
        connection.close()

    assert eventually(lambda: not page._server._connections, SECONDS)
    assert "<title>" in body(page)


# -- how long


def test_a_worker_has_one_page(workers, page):
    assert workers[0].run(gradwire.serve_page) is page


def test_a_closed_page_can_be_served_again(workers, page):
    page.close()
    page.close()

    again = workers[0].run(gradwire.serve_page)

    assert again.url != page.url
    assert "<title>" in body(again)


@pytest.mark.slow
def test_a_page_ends_with_its_worker_and_leaves_no_thread_and_no_file(directory):
    with cluster(2) as workers:
        page = workers[0].run(gradwire.serve_page)
        with answered(page, "events") as answer:
            next(events(answer))
            assert len(page_threads()) == 4
            assert len([*directory.iterdir()]) == 2
            workers[0].worker.close()
            assert [*events(answer)] == []
        assert page.is_closed
        assert page_threads() == []
        assert [*directory.iterdir()] == []


@pytest.mark.parametrize("port", [-1, 1 << 16, "80", 8.0, True])
def test_what_is_no_port_is_refused(workers, port):
    with pytest.raises(UsageError, match="is not a port"):
        workers[0].run(gradwire.serve_page, port)


def test_a_port_that_is_taken_is_an_error_that_says_so(workers, page):
    taken = urlsplit(page.url).port

    with pytest.raises(UsageError, match=f"no page can be served on port {taken}"):
        workers[1].run(gradwire.serve_page, taken)


@pytest.mark.slow
def test_many_viewers_come_and_go_without_growth(workers, page):
    def views(count):
        with answered(page, "events") as answer:
            stream = events(answer)
            for _ in range(count):
                next(stream)

    def round_of_ten(count):
        viewers = [threading.Thread(target=views, args=(count,)) for _ in range(10)]
        for viewer in viewers:
            viewer.start()
        return viewers

    def joined(viewers):
        for viewer in viewers:
            viewer.join()
        return not page._server._connections

    assert joined(round_of_ten(1)) or eventually(lambda: not page._server._connections, SECONDS)
    asked = workers[1].worker.agent._connections.readers.all()
    before = sum(reader.reads for reader in asked)
    viewers = round_of_ten(4)
    assert eventually(lambda: page_threads().count("gradwire w0 page viewer") == 10, SECONDS)
    for viewer in viewers:
        viewer.join()

    assert eventually(lambda: len(page_threads()) == 3, SECONDS + 5), page_threads()
    reads = sum(reader.reads for reader in asked) - before
    assert reads < 60, "each viewer had the workers asked for itself"


@pytest.mark.slow
def test_a_forked_process_does_not_serve_the_page_of_its_parent(page):
    with answered(page, "events") as answer:
        next(events(answer))
        child = os.fork()
        if child == 0:
            closed = page.is_closed, page._server.socket.fileno(), len(page._server._connections)
            page.close()
            os._exit(0 if closed == (True, -1, 0) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert next(events(answer))

    assert "<title>" in body(page)
    assert jobs.running_pages()


@pytest.mark.slow
def test_a_page_that_fails_says_so_and_shows_nothing_old(page, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError

    with answered(page, "events") as answer:
        stream = events(answer)
        next(stream)
        monkeypatch.setattr(page._watcher._history, "tick", broken)
        list(stream)

    assert "w0: its page has failed, and ends" in caplog.text


@pytest.mark.slow
def test_a_page_without_its_threads_leaves_nothing(workers, monkeypatch, directory):
    def none_left(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("gradwire.seeing.page.PageServer.start", none_left)

    with pytest.raises(RuntimeError):
        workers[0].run(gradwire.serve_page)

    assert page_threads() == []
    assert [*directory.iterdir()] == []


# -- where it is written down


def test_where_a_page_is_can_be_read_by_its_user_only(page, directory):
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}

    assert modes == {".page": 0o600, ".html": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (found,) = jobs.running_pages()
    assert (found.url, found.pid, found.worker) == (page.url, os.getpid(), "w0")
    assert page.url in jobs.file_to_open(found).read_text()


def test_a_directory_that_others_can_enter_is_refused(workers, directory):
    directory.mkdir(mode=0o755)

    with pytest.raises(UsageError, match="only you can enter"):
        workers[0].run(gradwire.serve_page)
    assert page_threads() == []


def test_a_link_in_the_place_of_the_directory_is_refused(workers, directory, tmp_path_factory):
    directory.symlink_to(tmp_path_factory.mktemp("elsewhere"))

    with pytest.raises(UsageError, match="only you can enter"):
        workers[0].run(gradwire.serve_page)


def test_what_dead_processes_have_left_is_removed(directory):
    directory.mkdir(mode=0o700)
    dead = JobPage("http://127.0.0.1:1/x/", 2**22 + 1, 1, "w0", "train.py", 2)
    paths = jobs.write_down(dead)
    broken = directory / "7-w0.page"
    broken.write_text("{")

    assert jobs.running_pages() == []
    assert [path for path in [*paths, broken] if path.exists()] == []


def a_page(pid, parent=1):
    return JobPage(f"http://127.0.0.1:1/{pid}/", pid, parent, "w0", "train.py", 2)


def test_the_only_job_is_chosen():
    assert jobs.chosen([a_page(7)], None) == a_page(7)


@pytest.mark.parametrize("job", ["8", "3"])
def test_a_job_is_chosen_by_its_process_or_the_one_that_started_it(job):
    assert jobs.chosen([a_page(7, 2), a_page(8, 3)], job) == a_page(8, 3)


@pytest.mark.parametrize(
    ("pages", "job", "why"),
    [
        ([], None, "no job of yours serves a page here"),
        ([a_page(7), a_page(8)], None, "2 jobs of yours serve pages"),
        ([a_page(7)], "9", "no job 9 serves a page here"),
    ],
)
def test_an_unclear_choice_is_an_error_that_lists_the_jobs(pages, job, why):
    with pytest.raises(UsageError, match=why) as caught:
        jobs.chosen(pages, job)

    assert all(f"{page.pid} (train.py, w0)" in caught.value.hint for page in pages)
    assert not any(page.url in str(caught.value) for page in pages)


# -- a recording


def test_a_recording_is_a_text_and_a_file(workers, page):
    with answered(page, "trace.json.gz") as answer:
        assert answer.status == 404

    text = body(page, "record?seconds=1")

    assert "over 3 workers (one clock)" in text
    with answered(page, "trace.json.gz") as answer:
        assert answer.status == 200
        rows = msgspec.json.decode(gzip.decompress(answer.read()))["traceEvents"]
    assert {row["pid"] for row in rows} >= {0, 1, 2}
    assert [member.worker.events.record for member in workers] == [None] * 3


@pytest.mark.parametrize("seconds", ["", "0", "11", "1e9", "-1", "999999999999"])
def test_a_recording_has_a_length_that_makes_sense(page, seconds):
    with answered(page, f"record?seconds={seconds}") as answer:
        assert answer.status == 400


def test_one_recording_is_taken_at_a_time(page):
    with page._watcher._recording, answered(page, "record?seconds=1") as answer:
        assert answer.status == 409
