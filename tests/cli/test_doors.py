"""What a command says of an address where there is no gateway, or the gateway's other door."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from control_plane.cluster.cluster import Serving
from hocket.cli import app
from hocket.commands.doors import OPERATOR, cause, check_address, explained
from hocket.commands.up import called_as, show_serving
from hocket.config import load_config
from hocket.errors import HocketError, InvalidRequest, WorkerUnavailable
from hocket.rpc.cluster_pb2_grpc import ClusterServicer, add_ClusterServicer_to_server
from hocket.rpc.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from tests.cluster.worker_descriptions import describe

GENERATE, STATUS, SCALE = ["generate", "Hi"], ["status"], ["scale", "prefill=2"]


@contextmanager
def grpc_door(is_for_requests: bool) -> Iterator[str]:
    """A server with one of the gateway's two services."""
    server = grpc.server(ThreadPoolExecutor(1))
    if is_for_requests:
        add_GenerationServicer_to_server(GenerationServicer(), server)
    else:
        add_ClusterServicer_to_server(ClusterServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def http_door() -> Iterator[str]:
    """Answers whatever comes as an HTTP/1.1 server does that does not understand it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def said(command: list[str], address: str) -> str:
    """What goes to stderr, which must be one line, of a command that must fail."""
    done = CliRunner().invoke(app, [*command, "--address", address])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("command", [GENERATE, STATUS, SCALE, ["status", "--watch"]])
def test_an_address_must_be_host_and_port(command: list[str]) -> None:
    assert said(command, "50051") == (
        "error: --address is '50051'; it must be host:port, as in 127.0.0.1:50051.\n"
    )


@pytest.mark.parametrize("address", ["", ":5", "http://127.0.0.1:5", "a:b", "a:0", "a:65536", "a:"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="must be host:port"):
        check_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:50051", "a.b-c:5"])
def test_what_is_an_address_is_taken(address: str) -> None:
    check_address(address)


def test_a_request_to_the_operators_door_is_told_the_other() -> None:
    with grpc_door(is_for_requests=False) as address:
        assert said(GENERATE, address) == (
            f"error: {address} answers, but is no gateway's door for requests; "
            "that is gateway.port (50051 by default).\n"
        )


@pytest.mark.parametrize("command", [STATUS, SCALE])
def test_an_operator_at_the_door_for_requests_is_told_the_other(command: list[str]) -> None:
    with grpc_door(is_for_requests=True) as address:
        assert said(command, address) == (
            f"error: {address} answers, but is no operator's door; "
            "that is gateway.admin_port (50052 by default).\n"
        )


@pytest.mark.parametrize(("command", "key"), [(GENERATE, "gateway.port"), (STATUS, "admin_port")])
def test_an_http_port_is_recognised(command: list[str], key: str) -> None:
    with http_door() as address:
        text = said(command, address)
    assert "that looks like an HTTP port; use" in text
    assert key in text


@pytest.mark.parametrize("command", [GENERATE, STATUS])
def test_why_nobody_answers_is_said_in_two_words(command: list[str]) -> None:
    assert said(command, "127.0.0.1:1").startswith(
        "error: no gateway answers at '127.0.0.1:1' (connection refused); is `hocket up` serving"
    )


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("errors resolving h:5: [field:hostname lookup error:Domain name not found]",
         "domain name not found"),
        ("Cancelling all calls", "cancelling all calls"),
        ("keepalive watchdog: timeout", "keepalive watchdog: timeout"),
        ("", ""),
    ],
)  # fmt: skip
def test_only_the_way_to_a_cause_is_cut(text: str, short: str) -> None:
    assert cause(HocketError(text)) == short


def test_what_a_gateway_said_itself_is_left_alone() -> None:
    error = WorkerUnavailable("no decode worker is there.")
    assert explained(error, "a:1", OPERATOR) is error


@pytest.mark.parametrize("command", [["--help"], ["generate", "--help"], ["scale", "--help"]])
def test_flags_take_no_value_in_the_help(command: list[str]) -> None:
    page = CliRunner().invoke(app, command, env={"COLUMNS": "80"}).stdout
    assert "--help " in page
    assert "bool" not in page
    assert "..." not in page.partition("Commands:")[2], "no description is cut short"


def test_grpcs_own_lines_stay_off_the_terminal() -> None:
    """It reads its variable when it is imported, so this takes a process of its own."""
    program = (
        "import asyncio, os\nfrom typer.testing import CliRunner\nfrom hocket.cli import app\n"
        "CliRunner().invoke(app, ['status', '--address', '127.0.0.1:1'])\n"
        "print(os.environ['GRPC_VERBOSITY'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("NONE\n", "")


@pytest.mark.parametrize("folder", ["/tmp/hk-x/logs", "/tmp/" + "long/" * 20])
def test_what_is_copied_from_the_table_of_up_is_never_folded(folder: str) -> None:
    serving = Serving(
        gateway_address="127.0.0.1:50051",
        http_address="127.0.0.1:8000",
        admin_address="127.0.0.1:50052",
        metrics_address="127.0.0.1:43126",
        redis_url="unix:///tmp/hk-zncn5pln/valkey.sock",
        log_folder=folder,
        workers=(),
    )
    page = io.StringIO()
    show_serving(Console(file=page, width=80), load_config(None), serving)
    for text in (serving.redis_url, "http://127.0.0.1:43126/metrics", folder, "gateway ", "a file"):
        assert text in page.getvalue()


@pytest.mark.parametrize(("rate", "is_told"), [(0.7, True), (0.0, False)])
def test_up_says_when_drafts_are_accepted_at_random(rate: float, is_told: bool) -> None:
    worker = describe(synthetic_acceptance=rate)
    serving = Serving("127.0.0.1:1", "", "", "", "unix:///x", "", (worker,))
    page = io.StringIO()
    show_serving(Console(file=page, width=160), load_config(None), serving)
    assert ("3 drafts, SYNTHETIC acceptance 0.70" in page.getvalue()) == is_told


@pytest.mark.parametrize(
    ("program", "is_on_path", "typed"),
    [
        ("/opt/venv/bin/hocket", True, "hocket"),
        ("/opt/venv/bin/hocket", False, "/opt/venv/bin/hocket"),
        ("/opt/my venv/bin/hocket", False, "'/opt/my venv/bin/hocket'"),
        ("/opt/hocket/cli.py", False, f"{sys.executable} -m hocket.cli"),
    ],
)
def test_the_program_is_named_so_that_it_can_be_typed(
    program: str, is_on_path: bool, typed: str
) -> None:
    assert called_as(program, is_on_path=is_on_path) == typed
