"""A wandb server that is not there, does not answer or refuses: a short wait, then files."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import wandb

from moh.config import LoggerConfig
from moh.reporting import wandb_logger
from moh.reporting.wandb_logger import RunLogger

CONFIG = {
    "name": "demo/vit/mha",
    "protocol": "demo",
    "heads": {"name": "mha"},
    "task": {"name": "classification"},
}
WAIT = 2  # seconds that these tests give a server


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Wandb as a new process finds it, with a made-up key."""
    wandb.teardown()
    monkeypatch.setattr(wandb_logger, "_answers", None)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(wandb_logger, "ANSWER_SECONDS", WAIT)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(wandb_logger, "INIT_SECONDS", WAIT)
    monkeypatch.setattr(wandb_logger, "END_SECONDS", WAIT)
    yield monkeypatch
    wandb.teardown()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a server: ``closed``, ``silent``, an HTTP status, or ``first only``."""
    kind = request.param
    if kind in ("closed", "silent"):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        if kind == "silent":
            listener.listen(8)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        return

    answered = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answered.append(self.path)
            if kind == "first only" and len(answered) > 1:
                time.sleep(4 * WAIT)
            status = int(kind) if kind.isdecimal() else 200
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"errors": [{"message": "not yours"}]}')

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()


def log_a_run(folder: Path, **settings: str) -> RunLogger:
    folder.mkdir()
    logger = RunLogger(LoggerConfig(**settings), folder, CONFIG, f"demo/vit/mha/{folder.name}")
    for step in range(3):
        logger.log({"task_loss": 1 / (step + 1)}, step)
    logger.close(failed=False)
    return logger


SERVERS = ["closed", "silent", "500", "401", "404", "first only"]


@pytest.mark.parametrize("server", SERVERS, indirect=True)
def test_without_its_server_the_curves_are_in_files_after_one_short_wait(
    server, fresh, tmp_path, capfd
):
    fresh.setenv("WANDB_BASE_URL", server)
    seconds, files = [], []
    for name in ("seed0", "seed1"):
        begun = time.monotonic()
        logger = log_a_run(tmp_path / name)
        seconds.append(time.monotonic() - begun)
        assert logger.mode == "offline"
        (run,) = (tmp_path / name / "wandb").glob("*run-*")  # and none of the attempt
        assert run.name.startswith("offline-run-")
        files.append(run / f"run-{logger.id}.wandb")
        assert (tmp_path / name / "wandb_id").read_text() == logger.id
    wandb.teardown()  # as at the end of a process; it writes what it holds
    for file in files:
        assert file.read_bytes().count(b"train/task_loss") >= 3
    assert seconds[0] < 20  # the client's own wait is 90
    assert seconds[1] < seconds[0] + 1
    printed = capfd.readouterr()
    assert printed.out.count("\n") == 1
    assert "logging to files" in printed.out
    assert printed.err == ""


def test_online_without_a_key_asks_nobody(fresh, tmp_path, capfd):
    fresh.delenv("WANDB_API_KEY")
    fresh.setenv("HOME", str(tmp_path))
    fresh.setenv("NETRC", str(tmp_path / "netrc"))
    fresh.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert log_a_run(tmp_path / "seed0").mode == "offline"
    assert "no key for http://127.0.0.1:9; logging to files" in capfd.readouterr().out


def test_in_a_sweep_the_run_is_the_one_that_the_agent_chose(fresh, tmp_path):
    settings = tmp_path / "config.yaml"
    settings.write_text("wandb_version: 1\nseed:\n  value: 3\n")
    fresh.setenv("WANDB_MODE", "offline")
    fresh.setenv("WANDB_SWEEP_ID", "abcd1234")
    fresh.setenv("WANDB_RUN_ID", "k3v9x2ab")
    fresh.setenv("WANDB_SWEEP_PARAM_PATH", str(settings))
    logger = log_a_run(tmp_path / "seed3")
    assert logger.id == "k3v9x2ab"
    assert (tmp_path / "seed3" / "wandb_id").read_text() == "k3v9x2ab"
    assert list((tmp_path / "seed3" / "wandb").glob("offline-run-*-k3v9x2ab"))
