"""Samples over a socket are those of the data set; what goes wrong on one side is told on the other; nobody hangs."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hetero_megatron.data.sample import Sample
from hetero_megatron.data.sample_server import SampleClient, SampleServer, ServedDataset
from hetero_megatron.errors import UserError

BAD = UserError("line 7 is not JSON", field="--data-path", value="a.jsonl", accepted="one object per line", where="a:7")


class Numbers:
    """Sample i has i + 1 documents; odd ones have a mask. Sample 70 is bad, sample 80 never comes."""

    def __getitem__(self, index: int) -> Sample:
        if index == 70:
            raise BAD
        if index == 80:
            time.sleep(60)
        if index == 90:
            raise KeyError("a defect")
        mask = (np.arange(100) % 3 == 0) if index % 2 else None
        return Sample(np.arange(101) * index, np.arange(index % 100 + 1, dtype=np.int32), mask)


class Lost(Exception):
    pass


def lost(seconds: float, error: Exception) -> Exception:
    return Lost(str(error) or type(error).__name__)


def serve(clients: int, timeout: float = 30.0) -> tuple[SampleServer, list[SampleClient]]:
    server = SampleServer({0: Numbers(), 2: Numbers()}, clients)
    made = [SampleClient(server.path, timeout, lost) for _ in range(clients)]
    server.start()
    assert not Path(server.path).parent.exists()
    return server, made


def test_many_threads_of_many_clients_get_the_same_samples() -> None:
    server, clients = serve(3)
    wanted = Numbers()

    def ask(seed: int) -> None:
        data = ServedDataset(clients[seed % 3], 2 * (seed % 2))
        for index in np.random.RandomState(seed).permutation(60).tolist():
            found, own = data[index], wanted[index]
            assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(found[:2], own[:2], strict=True))
            assert (found.loss_mask is None) == (own.loss_mask is None)
            assert own.loss_mask is None or np.array_equal(found.loss_mask, own.loss_mask)  # type: ignore[arg-type]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(12)))
    with pytest.raises(IndexError):
        ServedDataset(clients[0], 0)[-1]
    server.close()


def test_a_refusal_is_the_readers_own_and_good_samples_still_come() -> None:
    server, (client,) = serve(1)
    with pytest.raises(UserError) as found:
        client.fetch(0, 70)
    assert str(found.value) == str(BAD)
    assert client.fetch(0, 3).tokens[1] == 3
    with pytest.raises(Lost, match="KeyError"):  # a defect of the reader is no refusal
        client.fetch(0, 90)
    server.close()
    with pytest.raises(Lost):
        client.fetch(0, 3)


def test_why_a_reader_ends_is_what_the_others_raise() -> None:
    server, (asking, idle) = serve(2)
    said: list[Exception] = []

    def wait() -> None:
        try:
            asking.fetch(0, 80)
        except (UserError, Lost) as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)  # its request comes before, most likely; the outcome is the same
    server.close(BAD)
    thread.join(30)
    for _ in range(2):
        with pytest.raises(UserError) as found:
            idle.fetch(0, 1)
        assert str(found.value) == str(BAD)
    assert [str(error) for error in said] == [str(BAD)]


def test_no_answer_in_time_is_an_error_and_no_late_answer_is_taken() -> None:
    server, (client, other) = serve(2, timeout=0.2)
    with pytest.raises(Lost, match="no sample"):
        client.fetch(0, 80)
    with pytest.raises(Lost):
        client.fetch(0, 1)
    assert other.fetch(0, 1).tokens[1] == 1
    server.close()


def _reader(path: str) -> None:
    server = SampleServer({0: Numbers()}, 1)
    Path(path).write_text(server.path)
    server.start()
    time.sleep(600)


def test_a_reader_that_is_killed_is_noticed(tmp_path: Path) -> None:
    process = mp.get_context("fork").Process(target=_reader, args=(str(tmp_path / "path"),))
    process.start()
    while not (tmp_path / "path").exists() or not (tmp_path / "path").read_text():
        time.sleep(0.02)
    client = SampleClient((tmp_path / "path").read_text(), 600.0, lost)
    assert client.fetch(0, 5).tokens[1] == 5
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    with pytest.raises(Lost):  # at once, not after the time-out of ten minutes
        client.fetch(0, 80)
    process.join()


def test_a_long_folder_for_temporary_files_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server, (client,) = serve(1)
    assert client.fetch(2, 4).tokens[2] == 8
    server.close()


def test_no_folder_for_the_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/gone")  # a short path: a long one is not taken
    with pytest.raises(UserError, match="TMPDIR"):
        SampleServer({}, 1)
