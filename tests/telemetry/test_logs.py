"""Log lines in JSON, on a stream and in files."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket import logs
from hocket.errors import ConfigError
from hocket.logs import JsonFormatter, about, also_in_file, check_folder, configure_logging
from hocket.types import RequestKey


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("grpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def messages(text: str) -> list[str]:
    return [json.loads(line)["message"] for line in text.splitlines()]


def test_a_line_is_json_with_its_request() -> None:
    record = logging.makeLogRecord(
        {"msg": "took %d ms", "args": (5,), "levelname": "INFO", "name": "x", "request_id": "r1"}
    )
    line = json.loads(JsonFormatter("gateway").format(record))
    assert line["message"] == "took 5 ms"
    assert (line["process"], line["level"], line["request_id"]) == ("gateway", "info", "r1")


def test_a_line_of_several_lines_and_odd_values_is_one_line() -> None:
    record = logging.makeLogRecord({"msg": "a\nb", "path": Path("x"), "text": "\udcff", "_ray": 1})
    formatted = JsonFormatter("up").format(record)
    assert "\n" not in formatted
    line = json.loads(formatted)
    assert (line["message"], line["path"]) == ("a\nb", "x")
    assert "_ray" not in line
    formatted.encode()


def test_every_record_is_formatted_anew() -> None:
    formatter = JsonFormatter("up")
    records = [logging.makeLogRecord({"msg": text}) for text in ("one", "two")]
    assert messages("\n".join(map(formatter.format, [*records, records[0]]))) == [
        "one",
        "two",
        "one",
    ]


def test_a_workers_line_names_request_and_attempt() -> None:
    assert about(RequestKey("mine.ab", 2)) == {"request_id": "mine.ab", "attempt": 2}


def test_lines_go_to_the_stream_and_the_file_once_each(tmp_path: Path) -> None:
    stream = io.StringIO()
    for _ in range(2):
        configure_logging("warning", "decode-0.1", stream, folder=str(tmp_path / "new" / "folder"))
    logging.getLogger("a.b").info("no")
    logging.getLogger("a.b").warning("yes")
    assert messages(stream.getvalue()) == ["yes"]
    assert messages((tmp_path / "new" / "folder" / "decode-0.1.jsonl").read_text()) == ["yes"]


def test_debug_lines_of_grpc_and_asyncio_are_left_out() -> None:
    stream = io.StringIO()
    configure_logging("debug", "gateway", stream)
    for name in ("grpc._cython.cygrpc", "asyncio", "control_plane.gateway"):
        logging.getLogger(name).debug("detail of %s", name)
        logging.getLogger(name).warning("trouble of %s", name)
    assert messages(stream.getvalue()) == [
        "trouble of grpc._cython.cygrpc",
        "trouble of asyncio",
        "detail of control_plane.gateway",
        "trouble of control_plane.gateway",
    ]
    configure_logging("error", "gateway", stream)
    assert not logging.getLogger("asyncio").isEnabledFor(logging.WARNING)


def test_a_file_is_put_aside_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_LOG_FILE_BYTES", 1000)
    configure_logging("info", "up", io.StringIO(), folder=str(tmp_path))
    for number in range(100):
        logging.getLogger("a").info("line %d", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["up.jsonl", *(f"up.jsonl.{n}" for n in (1, 2, 3))]
    assert all(file.stat().st_size < 1200 for file in files)
    assert messages(files[0].read_text())[-1] == "line 99"


def test_the_launchers_lines_go_into_a_file_only_while_it_serves(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:]
    with also_in_file("up", str(tmp_path)):
        logging.getLogger("a").warning("inside")
    logging.getLogger("a").warning("outside")
    assert root.handlers == before
    assert messages((tmp_path / "up.jsonl").read_text()) == ["inside"]
    with also_in_file("up", ""):
        assert root.handlers == before


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/x"])
def test_a_folder_that_cannot_be_written_is_named(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.log_folder is '/") as caught:
        check_folder(folder)
    assert caught.value.metadata["field"] == "telemetry.log_folder"
    with pytest.raises(ConfigError):
        configure_logging("info", "up", folder=folder)
