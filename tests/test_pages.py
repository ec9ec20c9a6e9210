"""Pages on disk: whole or not there, whatever happens to their bytes, the disk or the process."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from longchat_cli.errors import MissingInput
from longchat_cli.pages import Store, digest
from longchat_cli.recall import kept
from longchat_cli.terminal import Console


def save(*values: float) -> Callable[[str, dict[str, str]], None]:
    return lambda name, metadata: save_file({"x": np.array(values, np.float32)}, name, metadata)


def values(store: Store, key: str) -> list[float] | None:
    page = store.open(key, "np")
    return None if page is None else page.get_tensor("x").tolist()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def test_a_page_comes_back_in_another_run(root: Path) -> None:
    assert Store(root, about={"method": "full"}).put("a", save(1, 2), {"more": "x"})
    store = Store(root)
    assert values(store, "a") == [1, 2]
    assert store.find("a")["more"] == "x"  # type: ignore[index]
    assert store.find("b") is None and values(store, "b") is None
    (entry,) = store.entries()
    assert (entry.key, entry.about()) == ("a", {"method": "full"})
    assert load_file(entry.path)["x"].tolist() == [1, 2]  # plain safetensors for everybody else


def test_private(root: Path) -> None:
    Store(root).put("a", save(1))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()] == [0o600]


def test_any_flipped_byte_is_seen_and_only_that_page_goes(root: Path) -> None:
    store = Store(root)
    store.put("a", save(*range(20)), {"more": "text"})
    store.put("b", save(5))
    path = store.path("a")
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (0, 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :])
            assert Store(root).find("a") is None, at
            assert not path.exists()
    assert values(Store(root), "b") == [5]


def test_truncated_longer_or_another_file(root: Path) -> None:
    store = Store(root)
    store.put("a", save(*range(20)))
    path = store.path("a")
    whole = path.read_bytes()
    for data in (
        *(whole[:n] for n in range(0, len(whole), 7)),
        whole + b"\0",
        b"\xff" * 50,
        b"\x80\x04" + whole,
    ):
        path.write_bytes(data)
        assert Store(root).find("a") is None
    store.put("b", save(1))
    store.path("b").rename(path)
    assert Store(root).find("a") is None, "another page under this name"


def test_verify_reads_all(root: Path) -> None:
    store = Store(root)
    for key in "abc":
        store.put(key, save(ord(key)))
    data = bytearray(store.path("b").read_bytes())
    data[-1] ^= 1
    store.path("b").write_bytes(data)
    assert Store(root).verify() == (2, ["b"])
    assert Store(root).verify() == (2, [])


def test_least_recently_used_goes_first(root: Path) -> None:
    size = one_page(root)
    for number, key in enumerate("abcd"):
        Store(root).put(key, save(1))
        os.utime(Store(root).path(key), (number, number))
    again = Store(root)
    again.find("a")
    again.touch()
    assert again.prune(2 * size) == 2 * size
    assert sorted(entry.key for entry in again.entries()) == ["a", "d"]
    assert again.prune(0) == 0 and not again.entries()


def test_the_last_pages_of_a_text_go_before_its_first(root: Path) -> None:
    size = one_page(root)
    store = Store(root)
    for key in "abcd":
        store.put(key, save(1))
    store.touch()
    Store(root).prune(2 * size)
    assert sorted(entry.key for entry in store.entries()) == ["a", "b"]


def one_page(root: Path) -> int:
    Store(root).put("z", save(1))
    return Store(root).discard("z")


def test_the_budget_is_kept_and_a_text_does_not_evict_itself(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = one_page(root)
    Store(root).put("old", save(1))
    store = Store(root, budget=3 * size + 5, console=Console())
    assert [store.put(key, save(1)) for key in "abcde"] == [True, True, True, False, False]
    assert sorted(entry.key for entry in store.entries()) == ["a", "b", "c"]
    assert capsys.readouterr().err.count("only a part") == 1


def test_the_first_use_is_told_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in "ab":
        Store(root, console=Console()).put(key, save(1))
    said = capsys.readouterr().err
    assert said.count("10.0 GiB at most") == 1 and str(root) in said and "--no-cache" in said


def test_reading_alone_makes_nothing(root: Path) -> None:
    store = Store(root)
    assert store.find("a") is None and store.entries() == [] and store.verify() == (0, [])
    assert store.prune(0) == 0
    store.touch()
    assert not root.exists()


def test_a_full_disk_costs_the_page_and_nothing_else(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(root)
    store.put("a", save(*range(100)))
    before = store.path("a").read_bytes()
    code = f"""
        import numpy as np, resource
        from pathlib import Path
        from safetensors.numpy import save_file
        from longchat_cli.pages import Store
        from longchat_cli.terminal import Console
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        store = Store(Path({str(root)!r}), console=Console())
        for key in ("a", "b", "c"):
            x = np.ones(2000, np.float32)
            print(store.put(key, lambda name, told: save_file({{"x": x}}, name, told)))
        print(store.find("a") is not None)
    """
    done = run(code)
    assert done.stdout.split() == ["False", "False", "False", "True"], done.stderr
    assert done.stderr.count("what was read is not kept") == 1
    assert [path.read_bytes() for path in root.iterdir()] == [before]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(root: Path) -> None:
    Store(root).put("a", save(1))
    root.chmod(0o500)
    store = Store(root)
    assert values(store, "a") == [1] and not store.put("b", save(1))
    root.chmod(0o700)


def test_a_place_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / "pages", console=Console())
    assert not store.put("a", save(1)) and store.find("a") is None
    assert "not kept" in capsys.readouterr().err


def test_what_killed_processes_left_is_cleared(root: Path) -> None:
    Store(root).put("a", save(1))
    for name, age in ((".tmp-old", 10_000), (".tmp-new", 0)):
        (root / name).write_bytes(b"half")
        os.utime(root / name, (root.stat().st_mtime - age,) * 2)
    Store(root).put("b", save(1))
    assert sorted(path.name for path in root.iterdir()) == [".tmp-new", "a.safetensors", "b.safetensors"]


def test_many_writers_and_a_pruner_at_once(root: Path) -> None:
    """Whoever finds a page finds what was written."""
    size = one_page(root)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            key = rng.choice("abcdef")
            store = Store(root, budget=4 * size)
            try:
                store.put(key, save(ord(key)))
                found = values(store, rng.choice("abcdef"))
                other = Store(root)
                for name in "abcdef":
                    if (found := values(other, name)) not in (None, [ord(name)]):
                        wrong.append(found)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [path for path in root.iterdir() if path.name.startswith(".tmp-")]


KILLED = """
    import itertools, sys
    from pathlib import Path
    import numpy as np
    from safetensors.numpy import save_file
    from longchat_cli.pages import Store
    store = Store(Path({root!r}))
    print("go", flush=True)
    for number in itertools.count():
        x = np.full(30_000, number % 7, np.float32)
        store.put(str(number % 7), lambda name, told: save_file({{"x": x}}, name, told))
"""


def kill_while_writing(root: Path, times: int) -> None:
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED.format(root=str(root)))],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout and process.stdout.readline() == "go\n"
        threading.Event().wait(random.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        store = Store(root)
        assert not store.verify()[1], "a page was visible before it was complete"
        for entry in store.entries():
            assert set(values(store, entry.key) or []) == {float(entry.key)}


def test_killed_while_writing(root: Path) -> None:
    kill_while_writing(root, 3)


@pytest.mark.slow
def test_killed_while_writing_many_times(root: Path) -> None:
    kill_while_writing(root, 60)


def test_names_depend_on_every_part_and_their_borders() -> None:
    names = {
        digest(""),
        digest("", b""),
        digest("", b"", b""),
        digest("", b"ab"),
        digest("", b"a", b"b"),
        digest("a", b"b"),
        digest("", {"a": 1}),
        digest("", {"a": 2}),
    }
    assert len(names) == 8
    assert digest("", {"a": 1, "b": 2}) == digest("", {"b": 2, "a": 1})


class Counting:
    """An encoder whose vectors are the texts' lengths; counts the texts it is given."""

    identity, width = "counting", 2

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, texts: list[str]) -> np.ndarray:
        self.encoded += len(texts)
        return np.array([[len(text), len(texts)] for text in texts], np.float32)


def vectors(root: Path | None, texts: list[str]) -> tuple[np.ndarray, int, int]:
    encoder = Counting()
    sizes = np.full(len(texts), 3)
    made, reused = kept.sentence_vectors(encoder, texts, sizes, Store(root) if root else None)
    assert reused == 3 * (len(texts) - encoder.encoded)
    fresh, _ = kept.sentence_vectors(Counting(), texts, sizes)
    np.testing.assert_array_equal(made, fresh)
    return made, reused, encoder.encoded


BOOK = [f"Sentence {i} of a book, {i * 7919 % 1000}." for i in range(3000)]


def test_an_edit_costs_the_runs_it_touches(root: Path) -> None:
    assert vectors(root, BOOK)[2] == 3000
    assert vectors(root, BOOK)[2] == 0
    for edited in (
        [*BOOK[:1500], "A sentence put in.", *BOOK[1500:]],
        [*BOOK[:700], *BOOK[705:]],
        ["A new beginning.", *BOOK],
        [*BOOK, *(f"Line {i} appended to the log." for i in range(20))],
    ):
        assert 0 < vectors(root, edited)[2] <= 2 * kept.MOST, "most of the text is read again"


def test_runs_cover_everything_and_are_bounded() -> None:
    for texts in (BOOK, ["same line"] * 1000, [], ["one"]):
        cut = list(kept.runs(texts))
        assert [t for run in cut for t in texts[run]] == texts
        assert all(kept.LEAST <= len(texts[run]) <= kept.MOST for run in cut[:-1])


def test_a_damaged_run_alone_is_encoded_again(root: Path) -> None:
    vectors(root, BOOK)
    paths = sorted(root.iterdir())
    data = bytearray(paths[4].read_bytes())
    data[len(data) // 2] ^= 4
    paths[4].write_bytes(data)
    encoded = vectors(root, BOOK)[2]
    assert kept.LEAST <= encoded <= kept.MOST
    assert vectors(root, BOOK)[2] == 0


def test_interrupted_indexing_goes_on(root: Path) -> None:
    class Stopping(Counting):
        def encode(self, texts: list[str]) -> np.ndarray:
            if self.encoded > 1000:
                raise KeyboardInterrupt
            return super().encode(texts)

    with pytest.raises(KeyboardInterrupt):
        kept.sentence_vectors(Stopping(), BOOK, np.full(len(BOOK), 3), Store(root))
    assert vectors(root, BOOK)[2] < 2000


def test_another_encoder_shares_nothing(root: Path) -> None:
    vectors(root, BOOK[:100])
    other = Counting()
    other.identity = "another"
    kept.sentence_vectors(other, BOOK[:100], np.full(100, 3), Store(root))
    assert other.encoded == 100


def test_a_page_given_up_for_the_budget_does_not_count_as_kept(root: Path) -> None:
    store = Store(root, budget=10)
    assert not store.put("a", save(1.0))
    assert (store.written, list(root.iterdir())) == (0, [])


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("")
    with pytest.raises(MissingInput, match="cannot read .*pages: Not a directory"):
        Store(tmp_path / "pages").verify()
