"""Reading documents: encodings, locations, folders by git's rules, pipes, and the error of each bad input."""

import io
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longchat_cli import documents
from longchat_cli.documents.encoding import Undecodable, decode
from longchat_cli.documents.folder import read_folder
from longchat_cli.errors import BadInput, LongchatError, MissingInput, UsageError

FRENCH = "Le garçon a mangé une crêpe près du château ; « c'est ça », dit-il. Où était-il né ?\n"
GERMAN = "Die Straße führt über die Brücke zum größten Schloß; schöne Mädchen grüßen höflich.\n"
RUSSIAN = "Сегодня хорошая погода, и мы пойдём гулять в парк.\nПривет!\n"
GREEK = "Καλημέρα, τι κάνετε; Σήμερα ο καιρός είναι καλός.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。\nどこで生れたかとんと見当がつかぬ。\n"
CHINESE = "道可道,非常道。名可名,非常名。\n无名天地之始;有名万物之母。\n"
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. Zítra bude hezky.\n"
UNICODE = (FRENCH, GERMAN, RUSSIAN, GREEK, JAPANESE, CHINESE, CZECH, "plain words\n", "emoji 🐋 here\n")


def text_of(data: bytes, name: str = "-") -> str:
    return documents.read([name], stdin=io.BytesIO(data)).documents[0].text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("text", UNICODE)
def test_unicode_encodings(text, encoding):
    assert text_of(text.encode(encoding)) == text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("text", UNICODE)
def test_unicode_without_a_mark(text, encoding):
    assert text_of(text.encode(encoding)) == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", GERMAN),
        ("latin-1", FRENCH),
        ("latin-1", "The café on the corner was closed, and nobody knew why it had shut.\n"),
        ("latin-1", "café"),
        ("latin-1", "¿Dónde está el niño? El señor Núñez soñó con montañas.\n"),
        ("cp1252", "‘Quite so,’ he said – “a naïve œuvre”… and it cost 5 €.\n"),
        ("latin-1", "Amanhã não há razões. O coração está às ordens; avós e mães.\n"),
        ("cp1250", CZECH),
        ("cp1251", RUSSIAN),
        ("koi8_r", RUSSIAN),
        ("cp1253", GREEK),
        ("cp932", JAPANESE),
        ("euc_jp", JAPANESE),
        ("gb18030", CHINESE),
    ],
)
def test_legacy_encodings(encoding, text):
    document = documents.read(["-"], stdin=io.BytesIO(text.encode(encoding))).documents[0]
    assert (document.text, document.encoding) == (text, encoding)


def test_the_locale_does_not_matter(tmp_path):
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode())
    code = "import sys, longchat_cli.documents as d; print(ascii(d.read(sys.argv[1:]).documents[0].text))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ascii(RUSSIAN)


def test_utf8_cut_inside_a_character_is_still_utf8():
    document = documents.read(["-"], stdin=io.BytesIO(RUSSIAN.encode()[:-9])).documents[0]
    assert document.text.startswith(RUSSIAN[:-7]) and document.encoding == "utf-8"
    assert "1 damaged character" in document.notes[0]


def test_a_multibyte_character_at_any_offset_is_no_binary():
    for offset in (4095, 8191, 8192, 65535, 1 << 20):
        assert decode(b"a" * offset + "猫".encode() + b"b").text == "a" * offset + "猫b"


def test_line_ends_nul_and_control_characters():
    document = documents.read(
        ["-"], stdin=io.BytesIO(b"one\r\ntwo\rth\0re\x07e\n\x1b[31mfour\x1b[0m\n")
    ).documents[0]
    assert document.text == "one\ntwo\nthree\nfour\n"
    assert document.notes == (
        "2 terminal escape sequences removed",
        "2 control characters removed (1 NUL)",
    )
    assert document.locate(document.text.index("four"), len(document.text)).line == 4


def test_nul_in_latin1_text_keeps_the_rest():
    assert text_of(GERMAN.encode("latin-1").replace(b"Schlo", b"Sch\0lo") * 20) == GERMAN * 20


@pytest.mark.parametrize(
    "data",
    [
        bytes(1000),
        random.Random(0).randbytes(5000),
        b"\x7fELF\x02\x01\x01" + bytes(60) + b"text in the middle" + bytes(range(256)),
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + random.Random(1).randbytes(500),
        b"x" * 50_000 + random.Random(2).randbytes(50_000),
        b"".join(value.to_bytes(2, "little", signed=True) for value in range(-300, 300, 7)),
    ],
)
def test_binary_data_is_told_from_text(data):
    with pytest.raises(BadInput, match="stdin is not a text file"):
        text_of(data)


def test_random_bytes_are_hardly_ever_text():
    source, accepted = random.Random(3), 0
    for _ in range(500):
        try:
            decode(source.randbytes(200))
            accepted += 1
        except Undecodable:
            pass
    assert accepted <= 2


def test_a_single_line_of_50_megabytes_is_quick():
    begun = time.perf_counter()
    document = documents.read(["-"], stdin=io.BytesIO(b"word " * 10_000_000)).documents[0]
    assert len(document.text) == 50_000_000 and document.locate(10**7, 10**7 + 5).line == 1
    assert time.perf_counter() - begun < 8


def test_locations():
    text = "first\nsecond\n\nfourth"
    document = documents.Document("a.txt", text)
    for begin, end, lines in [
        (0, 5, (1, 1)),
        (0, 6, (1, 1)),
        (6, 7, (2, 2)),
        (3, 8, (1, 2)),
        (13, 20, (3, 4)),
    ]:
        assert document.locate(begin, end) == documents.Location("a.txt", *lines)
    assert document.locate(10**9, 10**9).line == 4
    assert str(document.locate(3, 8)) == "a.txt:1-2" and str(document.locate(0, 1)) == "a.txt:1"


def test_every_line_is_located():
    lines = [f"line {number}" for number in range(1, 200)]
    document = documents.Document("a", "\n".join(lines))
    for number, line in enumerate(lines, 1):
        begin = document.text.index(line + "\n") if number < 199 else document.text.rindex(line)
        assert document.locate(begin, begin + len(line)) == documents.Location("a", number, number)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(files: dict[str, str | bytes]):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return make


def names(collection):
    return [document.name for document in collection.documents]


def test_a_folder_in_order_with_reasons(tree):
    tree(
        {
            "p/z.py": "z = 1\n",
            "p/README.md": "Read me.\n",
            "p/b/inner.txt": "inner\n",
            "p/b/readme": "first of b\n",
            "p/A.txt": "a\n",
            "p/a.bin": bytes(100),
            "p/empty.txt": "",
            "p/blank.txt": " \n",
            "p/book.pdf": b"%PDF-1.7",
            "p/.git/config": "secret\n",
        }
    )
    Path("p/link.txt").symlink_to("A.txt")
    Path("p/loop").symlink_to("..")
    os.mkfifo("p/pipe")
    found = documents.read(["p"])
    assert names(found) == ["p/README.md", "p/A.txt", "p/z.py", "p/b/readme", "p/b/inner.txt"]
    assert {skip.name: skip.reason for skip in found.skips} == {
        "p/a.bin": "binary data",
        "p/blank.txt": "only white space",
        "p/book.pdf": "damaged (Stream has ended unexpectedly)",
        "p/empty.txt": "empty",
        "p/link.txt": "symbolic link, not followed",
        "p/loop": "symbolic link, not followed",
        "p/pipe": "not a regular file",
    }


def test_folder_files_are_headed_by_their_path_and_keep_their_lines(tree):
    tree({"p/a.txt": "one\ntwo\n"})
    document = documents.read(["p"]).documents[0]
    assert document.text == "File: p/a.txt\n\none\ntwo\n"
    begin = document.text.index("two")
    assert str(document.locate(begin, begin + 3)) == "p/a.txt:2"
    assert str(document.locate(0, 4)) == "p/a.txt:1"


def test_oversized_files_of_a_folder_are_skipped(tree):
    root = tree({"p/big.txt": "x" * 3000, "p/a.txt": "a\n"})
    found = read_folder(root / "p", max_bytes=2000)
    assert len(found.documents) == 1 and found.skips[0].reason == "too large (2.9 KiB, limit 2.0 KiB)"


def test_nested_gitignore(tree):
    tree(
        {
            ".gitignore": "*.log\n/build/\n!keep.log\nnode_modules\n",
            "a.log": "no\n",
            "keep.log": "yes\n",
            "build/x.txt": "no\n",
            "sub/build/x.txt": "yes\n",
            "sub/.gitignore": "!a.log\nprivate.txt\n",
            "sub/a.log": "yes\n",
            "sub/private.txt": "no\n",
            "private.txt": "yes\n",
            "sub/node_modules/m.js": "no\n",
        }
    )
    found = documents.read(["."])
    assert [d.text.split("\n")[2] for d in found.documents if ".gitignore" not in d.name] == ["yes"] * 4
    assert found.ignored == 4 + 0 * len(found.skips)


def test_rules_of_the_enclosing_repository_hold(tree):
    tree(
        {
            ".git/info/exclude": "secret*\n",
            ".gitignore": "*.tmp\nout/\n",
            "s/a.tmp": "no\n",
            "s/b.txt": "yes\n",
        }
    )
    tree({"s/secret.txt": "no\n", "out/x.txt": "named on purpose\n"})
    assert names(documents.read(["s"])) == ["s/b.txt"]
    assert names(documents.read(["out"])) == ["out/x.txt"]


PATTERNS = [
    "*.log", "!a.log", "/a.txt", "b/", "!b/", "b/*", "!b/a.txt", "**/c", "a/**", "c/**/a.txt", "[ab].txt",
    "?.log", "#x", "\\#x", "!", "b.txt ", "/b/c", "*", "!*/", "\\!x", "a/**/b.txt", "!/a", "*.[lt]*",
    "!*.txt",
]  # fmt: skip


@pytest.mark.skipif(not shutil.which("git"), reason="git is the oracle")
@pytest.mark.parametrize("seed", range(6))
def test_ignore_rules_agree_with_git(tree, seed):
    source = random.Random(seed)
    folders = ["", "a/", "b/", "c/", "a/b/", "b/c/", "c/a/", "b/c/a/"]
    files = [
        folder + leaf for folder in folders for leaf in ("a.txt", "b.txt", "a.log", "c.log", "#x", "!x", "z")
    ]
    ignores = {f + ".gitignore": "\n".join(source.choices(PATTERNS, k=3)) for f in source.sample(folders, 3)}
    root = tree({**dict.fromkeys(files, "text\n"), **ignores})
    subprocess.run(["git", "init", "-q"], check=True)
    command = ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "-z", "--others", "--exclude-standard"]
    expected = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    found = read_folder(root)
    assert sorted(os.path.relpath(name, root) for name in names(found)) == sorted(expected), ignores


def line_and_code(call) -> tuple[str, int]:
    with pytest.raises(LongchatError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.exit_code


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("boook.txt", "boook.txt does not exist; did you mean book.txt?", 66),
        ("nowhere/x.txt", "nowhere/x.txt does not exist", 66),
        ("book.txt/x", "book.txt/x does not exist", 66),
        ("n\0ul", "n\\x00ul does not exist", 66),
        ("x" * 300, "x" * 300 + " does not exist", 66),
        ("", "a document's name is empty; name a file, a folder or -", 66),
        ("empty.txt", "empty.txt holds no text: empty", 65),
        ("blank.txt", "blank.txt holds no text: only white space", 65),
        ("image", "image is not a text file: binary data", 65),
        ("book.pdf", "book.pdf cannot be read: damaged (Stream has ended unexpectedly)", 65),
        ("BOOK.EPUB", "BOOK.EPUB cannot be read: damaged (File is not a zip file)", 65),
        ("hidden", "hidden holds no text file: 1 x damaged (File is not a zip file)", 65),
        ("old.doc", "old.doc cannot be read: DOC is not supported; convert it to text first", 65),
        ("none", "none holds no text file: it is empty", 65),
        ("binaries", "binaries holds no text file: 2 x binary data, 1 x empty", 65),
        ("/dev/null", "/dev/null cannot be read: it is a device or a socket, not a document", 65),
        ("/dev/zero", "/dev/zero cannot be read: it is a device or a socket, not a document", 65),
    ],
)
def test_each_bad_input_gives_one_line(tree, name, line, code):
    root = tree(
        {
            "book.txt": "text\n",
            "empty.txt": "",
            "blank.txt": "\n \n",
            "image": random.Random(0).randbytes(3000),
            "book.pdf": b"%PDF-1.7\n",
            "BOOK.EPUB": b"PK\x03\x04",
            "old.doc": b"\xd0\xcf\x11\xe0",
            "hidden": b"PK\x03\x04rest",
            "binaries/a": bytes(10),
            "binaries/b": bytes(10),
            "binaries/c": "",
        }
    )
    (root / "none").mkdir()
    assert line_and_code(lambda: documents.read([name])) == (line, code)


def test_stdin_errors():
    with pytest.raises(UsageError):
        documents.read(["-"], stdin=None)
    with pytest.raises(UsageError):
        documents.read(["-", "-"], stdin=io.BytesIO(b"x"))
    line, code = line_and_code(lambda: documents.read(["-"], stdin=io.BytesIO(b"")))
    assert (line, code) == ("stdin holds no text: empty", 65)


def test_a_socket_is_refused(tree):
    tree({})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(BadInput):
            documents.read(["s"])


def test_a_name_that_is_no_unicode_can_be_printed(tree):
    tree({})
    name = os.fsdecode(b"caf\xe9\n.txt")
    Path(name).write_text("text\n")
    assert documents.read([name]).documents[0].name == "caf\\xe9\\n.txt"


UNREADABLE = """
import os, sys
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
from longchat_cli.documents import read
from longchat_cli.errors import LongchatError
for name in sys.argv[1:]:
    try:
        print(", ".join(f"{skip.name}: {skip.reason}" for skip in read([name]).skips))
    except LongchatError as error:
        print(error.exit_code, error)
"""


def test_unreadable_files_and_folders(tree):
    root = tree(
        {
            "f.txt": "text\n",
            "d/a.txt": "text\n",
            "e/ok.txt": "text\n",
            "e/locked.txt": "text\n",
            "e/in/x": "x\n",
        }
    )
    for name in ("f.txt", "d", "e/locked.txt", "e/in"):
        (root / name).chmod(0)
    root.chmod(0o755)
    code = f"import sys; sys.path[:] = {sys.path!r}\nimport longchat_cli.documents.reading" + UNREADABLE
    result = subprocess.run(
        [sys.executable, "-c", code, "f.txt", "d", "e"], capture_output=True, text=True, check=False
    )
    for name in ("d", "e/in"):
        (root / name).chmod(0o700)
    if "/pytest-of-" in str(root) and "does not exist" in result.stdout:
        pytest.skip("the temporary folder is closed to other users")
    assert result.stdout.splitlines() == [
        "66 cannot read f.txt: permission denied",
        "66 cannot read d: permission denied",
        "e/locked.txt: permission denied, e/in: permission denied",
    ], result.stderr


def test_a_named_pipe_is_read_to_its_end(tree):
    tree({})
    os.mkfifo("pipe")

    def write():
        with Path("pipe").open("wb") as pipe:
            for _ in range(3):
                pipe.write(b"some text\n" * 10_000)
                pipe.flush()
                time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    assert len(documents.read(["pipe"]).documents[0].text) == 300_000
    writer.join()


def test_process_substitution():
    read_end, write_end = os.pipe()
    os.write(write_end, b"from a command\n")
    os.close(write_end)
    assert documents.read([f"/dev/fd/{read_end}"]).documents[0].text == "from a command\n"
    os.close(read_end)


def test_a_pipe_that_nobody_writes_to_does_not_hang(tree, monkeypatch):
    tree({})
    os.mkfifo("pipe")
    monkeypatch.setattr("longchat_cli.documents.reading._PIPE_PATIENCE", 0.2)
    with pytest.raises(BadInput, match="holds no text"):
        documents.read(["pipe"])


@pytest.mark.parametrize("target", ["nowhere.txt", "link.txt"])
def test_a_link_that_leads_nowhere(tree, target):
    tree({})
    Path("link.txt").symlink_to(target)
    with pytest.raises(MissingInput, match=r"^link.txt does not exist: it is a link that leads nowhere$"):
        documents.read(["link.txt"])


def test_several_names_keep_their_order(tree):
    tree({"b.txt": "b\n", "p/a.txt": "a\n"})
    found = documents.read(["b.txt", "-", "p"], stdin=io.BytesIO(b"piped\n"))
    assert names(found) == ["b.txt", "stdin", "p/a.txt"]
    assert issubclass(MissingInput, LongchatError) and found.documents[1].text == "piped\n"


def test_empty_documents_among_others_are_skipped(tree):
    tree({"empty.txt": b"", "blank.md": " \n\n", "full.txt": "words", "binary.bin": bytes(range(256)) * 9})
    found = documents.read(["empty.txt", "full.txt", "blank.md"])
    assert [document.text for document in found.documents] == ["words"]
    skipped = [(skip.name, skip.reason) for skip in found.skips]
    assert skipped == [("empty.txt", "empty"), ("blank.md", "only white space")]
    with pytest.raises(BadInput, match="holds no text"):
        documents.read(["empty.txt", "blank.md"])
    with pytest.raises(BadInput, match="not a text file"):  # where something is lost
        documents.read(["full.txt", "binary.bin"])
