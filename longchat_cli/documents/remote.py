"""Documents behind a URL: https pages and files, and git repositories. Fetched only when named themselves."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from longchat_cli import __version__
from longchat_cli.config import format_bytes, offline
from longchat_cli.documents.names import brief, printable
from longchat_cli.errors import BadInput, MissingInput, Unavailable, UsageError

MAX_BYTES = 64 << 20
MAX_SECONDS = 120.0
_PATIENCE = 20.0
"""Seconds without a byte after which a server is given up."""
_MAX_REDIRECTS = 5
_FORGES = {"github.com", "gitlab.com", "codeberg.org", "bitbucket.org"}
"""Where https://HOST/OWNER/NAME is a repository without saying `.git`."""
_SUFFIXES = {
    "text/html": ".html",
    "application/xhtml+xml": ".html",
    "application/pdf": ".pdf",
    "application/epub+zip": ".epub",
    "application/zip": ".zip",
    "application/gzip": ".gz",
    "application/x-tar": ".tar",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
}
_GONE = {404, 410}


@dataclass(frozen=True)
class Fetched:
    """What a URL gave; `suffix` is the kind of file that the server names, else what the path ends with."""

    data: bytes
    suffix: str


@dataclass(frozen=True)
class Repository:
    """A git repository; `ref` is the branch or tag, "" the default one."""

    url: str
    ref: str = ""

    @property
    def name(self) -> str:
        """github.com/owner/name."""
        return printable(self.url.partition("://")[2].removesuffix(".git"))


def is_remote(name: str) -> bool:
    """The name is a URL and not a file."""
    scheme, separator, rest = name.partition("://")
    return bool(separator and rest) and scheme.replace("+", "").isalnum()


def locate(url: str) -> str | Repository:
    """The page or repository that a URL names.

    Raises Unavailable (offline) and UsageError (not https, a password in it, no host).
    """
    shown = printable(url)
    parts = _split(url)
    scheme = parts.scheme.removeprefix("git+")
    if scheme != "https":
        raise UsageError(f"{shown} is not read", f"{parts.scheme} is not safe or not known", "use https://")
    if parts.username is not None:
        host = parts.hostname or ""
        raise UsageError(f"the URL on {host} has a name or password in it", "", "download it first")
    if not parts.hostname:
        raise UsageError(f"{shown} names no host")
    if offline():
        raise Unavailable(f"{shown} is not read", "--offline forbids the network", "download it first")
    path = parts.path.strip("/")
    plain = urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    forge = parts.hostname in _FORGES and path.count("/") == 1 and not parts.query
    if parts.scheme.startswith("git+") or path.endswith(".git") or forge:
        if parts.fragment.startswith("-"):
            raise UsageError(f"{shown} names no branch or tag")
        return Repository(plain, parts.fragment)
    return urlunsplit(parts._replace(fragment=""))


def fetch(url: str, schemes: Sequence[str] = ("https",)) -> Fetched:
    """Read a URL within the limits of size and time; a redirect must keep to `schemes`.

    Raises MissingInput (404), BadInput (too large) and Unavailable.
    """
    shown = printable(url)
    deadline = time.monotonic() + MAX_SECONDS
    headers = {"User-Agent": f"longchat/{__version__}", "Accept-Encoding": "identity"}
    opener = urllib.request.OpenerDirector()  # the usual one would also read files and ftp
    for handler in _handlers(schemes):
        opener.add_handler(handler)
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_PATIENCE) as response:
            data = _read(response, deadline, shown)
            return Fetched(data, _suffix(response.headers, response.url))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in _GONE:
            raise MissingInput(f"{shown} does not exist", f"the server says {error.code}") from error
        raise Unavailable(f"cannot read {shown}", brief(error)) from error
    except urllib.error.URLError as error:
        why = error.reason if isinstance(error.reason, BaseException) else error
        raise Unavailable(f"cannot read {shown}", brief(why)) from error
    except (OSError, HTTPException, ValueError) as error:
        raise Unavailable(f"cannot read {shown}", brief(error)) from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _MAX_REDIRECTS

    def __init__(self, schemes: Sequence[str]) -> None:
        self._schemes = schemes

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in self._schemes:
            raise urllib.error.URLError(f"it redirects to {printable(scheme)}, which is not followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _handlers(schemes: Sequence[str]) -> list[urllib.request.BaseHandler]:
    kinds = {"https": urllib.request.HTTPSHandler, "http": urllib.request.HTTPHandler}
    return [
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(schemes),
        *(kinds[scheme]() for scheme in schemes),
    ]


def _read(response: Any, deadline: float, shown: str) -> bytes:
    said = response.headers.get("Content-Length", "")
    expected = int(said) if said.isdigit() else 0
    data = bytearray()
    while max(len(data), expected) <= MAX_BYTES:
        chunk = response.read1(1 << 16)
        data += chunk
        if not chunk and len(data) >= expected:
            return bytes(data)
        if not chunk:
            raise Unavailable(f"cannot read {shown}", "the connection ended in the middle")
        if time.monotonic() > deadline:
            raise Unavailable(f"cannot read {shown}", f"it took longer than {MAX_SECONDS:.0f} s")
    raise BadInput(f"{shown} is too large", f"the limit is {format_bytes(MAX_BYTES)}", "download it first")


def _suffix(headers: Message, url: str) -> str:
    path = urlsplit(url).path.rpartition("/")[2]
    ending = f".{path.rpartition('.')[2].lower()}" if "." in path else ""
    return _SUFFIXES.get(headers.get_content_type(), ending)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"{printable(url)} is no URL", brief(error)) from error
    return parts
