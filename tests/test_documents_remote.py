"""Documents behind URLs, from a server and repositories on this machine."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longchat_cli import documents
from longchat_cli.ask import split_arguments
from longchat_cli.documents import clone, reading, remote
from longchat_cli.documents.remote import Repository
from longchat_cli.errors import BadInput, LongchatError, MissingInput, Unavailable, UsageError

HTTP = ("http",)


class Site(http.server.BaseHTTPRequestHandler):
    """Pages for the tests; what was asked for is kept in `asked`."""

    asked: list[str] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.split("?")[0].strip("/")
        getattr(self, f"give_{name.split('.')[0].split('/')[0]}", self.give_nothing)()

    def give(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for key, value in {"Content_Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def give_nothing(self) -> None:
        self.give(404)

    def give_note(self) -> None:
        self.give(200, b"The mill has seven sails.\n", Content_Type="text/plain")

    def give_page(self) -> None:
        page = b"<html><body><p>Seven <b>sails</b>.</p><script>x()</script></body></html>"
        self.give(200, page, Content_Type="text/html; charset=utf-8")

    def give_moved(self) -> None:
        self.give(302, Location="/note.txt")

    def give_circle(self) -> None:
        self.give(302, Location="/circle")

    def give_elsewhere(self) -> None:
        self.give(302, Location=self.path.partition("?")[2])

    def give_secret(self) -> None:
        self.give(401)

    def give_broken(self) -> None:
        self.give(200, b"half", Content_Length="400")
        self.close_connection = True

    def give_large(self) -> None:
        self.give(200, b"", Content_Length=str(remote.MAX_BYTES + 1))
        self.close_connection = True

    def give_endless(self) -> None:
        self.give(200, b"", Content_Length="")
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONGCHAT_OFFLINE", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("https://example.org/a", True),
        ("git+https://example.org/a", True),
        ("ftp://example.org", True),
        ("book.txt", False),
        ("://", False),
        ("a b://c", False),
        ("https:/example.org", False),
    ],
)
def test_what_is_a_url(name: str, expected: bool) -> None:
    assert documents.is_remote(name) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.org/a?b=1#part", "https://example.org/a?b=1"),
        ("https://example.org/x/y.git", Repository("https://example.org/x/y.git")),
        ("https://example.org/x/y.git#v1.0", Repository("https://example.org/x/y.git", "v1.0")),
        ("git+https://example.org/x", Repository("https://example.org/x")),
        ("https://github.com/owner/name/", Repository("https://github.com/owner/name")),
        ("https://github.com/owner/name/blob/main/a.py", "https://github.com/owner/name/blob/main/a.py"),
    ],
)
def test_pages_and_repositories(url: str, expected: object) -> None:
    assert remote.locate(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a",
        "ftp://example.org/a",
        "file:///etc/passwd",
        "git+ssh://git@example.org/a",
        "git+ext://sh -c id",
        "git+file:///tmp/a",
        "https://user:secret@example.org/",
        "https:///nowhere",
        "https://[1::2/",
        "https://example.org:port/",
        "https://example.org/a.git#--upload-pack=id",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        documents.read([url])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("variable", ["LONGCHAT_OFFLINE", "HF_HUB_OFFLINE"])
def test_never_offline(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("went to the network"))
    for url in ("https://example.org/a", "https://github.com/owner/name"):
        with pytest.raises(Unavailable, match="--offline forbids the network") as caught:
            documents.read([url])
        assert caught.value.exit_code == 69


def test_a_sole_url_is_a_document_without_a_question() -> None:
    with pytest.raises(UsageError, match=r"the question about https://example\.org is missing"):
        split_arguments(["https://example.org"], [], True)


def test_pages_are_read_as_what_the_server_says(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "locate", lambda url: url)
    fetch = remote.fetch
    monkeypatch.setattr(remote, "fetch", lambda url: fetch(url, HTTP))
    (page,) = documents.read([f"{site}/page.php?x=1"]).documents
    assert page.text.strip() == "Seven sails."
    assert page.name == f"{site}/page.php?x=1"
    (note,) = documents.read([f"{site}/moved"]).documents
    assert note.text == "The mill has seven sails.\n"
    assert str(note.locate(4, 8)) == f"{site}/moved:1"


@pytest.mark.parametrize(
    ("path", "kind", "part"),
    [
        ("/none", MissingInput, "does not exist"),
        ("/secret", Unavailable, "401"),
        ("/broken", Unavailable, "ended in the middle"),
        ("/large", BadInput, "too large"),
        ("/circle", Unavailable, "cannot read"),
        ("/elsewhere?file:///etc/passwd", Unavailable, "is not allowed"),
        ("/elsewhere?ftp://127.0.0.1/a", Unavailable, "redirects to ftp"),
        ("/elsewhere?https://127.0.0.1/a", Unavailable, "redirects to https"),
    ],
)
def test_what_servers_do_wrong(site: str, path: str, kind: type[LongchatError], part: str) -> None:
    with pytest.raises(kind, match=part):
        remote.fetch(site + path, HTTP)


def test_endless_and_slow_answers_are_cut(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 1 << 20)
    with pytest.raises(BadInput, match="too large"):
        remote.fetch(f"{site}/endless", HTTP)
    monkeypatch.setattr(remote, "MAX_BYTES", 1 << 40)
    monkeypatch.setattr(remote, "MAX_SECONDS", 0.2)
    with pytest.raises(Unavailable, match="longer than"):
        remote.fetch(f"{site}/endless", HTTP)


def test_plain_http_is_not_even_asked(site: str) -> None:
    Site.asked.clear()
    with pytest.raises(Unavailable):
        remote.fetch(f"{site}/note.txt")
    assert Site.asked == []


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{probe.getsockname()[1]}/a"
    with pytest.raises(Unavailable, match="refused"):
        documents.read([url])


Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    def call(*words: str, at: Path = tmp_path) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
        command = ["git", *names, "-C", str(at), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return call


@pytest.fixture
def repository(tmp_path: Path, git: Git) -> Path:
    """A bare repository of two commits, a branch `old`, a link, a filter and a submodule."""
    work, other, bare = tmp_path / "work", tmp_path / "other", tmp_path / "bare.git"
    for folder in (work, other):
        folder.mkdir()
        git("init", "-q", "-b", "main", at=folder)
    (other / "inner.txt").write_text("not to be read\n")
    git("add", ".", at=other)
    git("commit", "-qm", "inner", at=other)
    (work / "README.md").write_text("first\n")
    git("add", ".", at=work)
    git("commit", "-qm", "one", at=work)
    git("branch", "old", at=work)
    (work / "README.md").write_text("The mill has seven sails.\n")
    (work / ".gitattributes").write_text("*.md filter=evil\n")
    (work / "src").mkdir()
    (work / "src" / "a.py").write_text("x = 1\n")
    (work / "link").symlink_to("/etc/passwd")
    git("submodule", "--quiet", "add", str(other), "sub", at=work)
    git("add", ".", at=work)
    git("commit", "-qm", "two", at=work)
    git("clone", "-q", "--bare", str(work), str(bare))
    return bare


needs_git = pytest.mark.skipif(not any(Path(p, "git").exists() for p in os.get_exec_path()), reason="no git")


@needs_git
def test_a_repository_is_read_like_a_folder(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def cloned(found: Repository) -> object:
        assert found == Repository("https://example.org/owner/mill.git")
        return clone.cloned(Repository(f"file://{repository}"), ("file",))

    def read_folder(folder: Path, options: object, name: str) -> documents.Collection:
        places.append(folder)
        assert git_log(folder) == 1, "depth 1"
        return folder_reader(folder, options, name=name)

    folder_reader = reading.read_folder
    monkeypatch.setattr(reading, "cloned", cloned)
    monkeypatch.setattr(reading, "read_folder", read_folder)
    found = documents.read(["https://example.org/owner/mill.git"])
    names = [document.name for document in found.documents]
    assert names[0] == "example.org/owner/mill/README.md"
    assert "example.org/owner/mill/src/a.py" in names
    assert found.documents[0].text == "File: example.org/owner/mill/README.md\n\nThe mill has seven sails.\n"
    assert not [name for name in names if "inner" in name], "submodules stay out"
    assert [skip.reason for skip in found.skips if skip.name.endswith("/link")] == [
        "symbolic link, not followed"
    ]
    assert not places[0].exists()


def git_log(folder: Path) -> int:
    log = subprocess.check_output(["git", "-C", str(folder), "log", "--oneline"], text=True)
    return len(log.splitlines())


@needs_git
def test_branches_and_what_is_not_there(repository: Path) -> None:
    with clone.cloned(Repository(f"file://{repository}", "old"), ("file",)) as folder:
        assert (folder / "README.md").read_text() == "first\n"
    with (
        pytest.raises(MissingInput, match="Remote branch none"),
        clone.cloned(Repository(f"file://{repository}", "none"), ("file",)),
    ):
        pass
    with (
        pytest.raises(MissingInput, match="does not appear to be"),
        clone.cloned(Repository(f"file://{repository}-none"), ("file",)),
    ):
        pass


@needs_git
def test_nothing_a_user_configured_runs(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks of a template and a hooks path, a credential helper and an askpass program leave no trace."""
    home, trace = tmp_path / "home", tmp_path / "trace"
    hooks = home / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text(f"#!/bin/sh\ntouch {trace}\n")
    (hooks / "post-checkout").chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[init]\n\ttemplateDir = {home}/template\n[core]\n\thooksPath = {hooks}\n\taskPass = touch {trace}\n"
        f"[credential]\n\thelper = !touch {trace}\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_ASKPASS", f"touch {trace}")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.hooksPath")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(hooks))
    with clone.cloned(Repository(f"file://{repository}"), ("file",)):
        assert not trace.exists()


@needs_git
@pytest.mark.parametrize("url", ["file://{}", "{}", "ext::sh -c 'touch {}/trace'", "http://127.0.0.1:1/a"])
def test_other_protocols_are_refused_by_git_itself(repository: Path, url: str) -> None:
    with (
        pytest.raises(Unavailable, match="not allowed"),
        clone.cloned(Repository(url.format(repository))),
    ):
        pass
    assert not (repository / "trace").exists()


@needs_git
def test_passwords_are_not_asked_for(site: str) -> None:
    with (
        pytest.raises(MissingInput, match="could not read Username"),
        clone.cloned(Repository(f"{site}/secret"), HTTP),
    ):
        pass


@needs_git
def test_limits_of_size_and_time_leave_nothing(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name, value, kind in (("MAX_BYTES", 100, BadInput), ("MAX_SECONDS", -1.0, Unavailable)):
        with monkeypatch.context() as patch, pytest.raises(kind):
            patch.setattr(clone, name, value)
            with clone.cloned(Repository(f"file://{repository}"), ("file",)):
                pass
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_interrupt_ends_git_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that never ends, with a helper of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()
    git = tmp_path / "bin" / "git"
    git.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path}/pids\nwait\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def interrupt(*_: object) -> None:
        if (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"):
            raise KeyboardInterrupt

    monkeypatch.setattr(clone, "_refuse_large", interrupt)
    with pytest.raises(KeyboardInterrupt), clone.cloned(Repository("https://example.org/a.git")):
        pass
    assert list((tmp_path / "tmp").iterdir()) == []
    for pid in (tmp_path / "pids").read_text().split():
        assert _is_gone(int(pid))


def _is_gone(pid: int) -> bool:
    """Nobody runs under `pid`; a killed orphan may wait for init to take note of it."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (OSError, IndexError):
            return True
        time.sleep(0.05)
    return False


def test_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(Unavailable, match="git is not installed"),
        clone.cloned(Repository("https://e.org/a")),
    ):
        pass
