"""Code without an image: what a coordinator takes, what is sent to it, and `tandem run --code`."""

import base64
import hashlib
import http.client
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.rundir.code import MAX_PACKED_BYTES
from tandem.rundir.durable import TEMPORARY
from tandem.wire.coordinator_client import CoordinatorRefused, Unreachable
from tandem_cli.packing import packed
from tests.support import coded
from tests.support.coordinator_process import Coordinator
from tests.support.elastic import TOKEN
from tests.support.fake_kubectl import FakeKubectl
from tests.support.fake_kubectl import job as fake_job
from tests.support.local_run import LocalRun
from tests.support.processes import tandem
from tests.support.waiting import until

PACK = os.urandom(3 * 2**20)
DIGEST = f"sha256:{hashlib.sha256(PACK).hexdigest()}"
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator whose job waits for its code."""
    made = Coordinator(tmp_path, trainer={"command": ["train.py"], "code": DIGEST}).start()
    yield made
    made.kill()


def send(coordinator: Coordinator, content: bytes = PACK, digest: str = DIGEST, token: str = TOKEN) -> list[int]:
    sent: list[int] = []
    with coordinator.client(token) as client:
        client.send_code(digest, io.BytesIO(content), len(content), sent.append)
    return sent


def left(coordinator: Coordinator) -> list[str]:
    """Names in the folder of packs."""
    folder = coordinator.rundir.code
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def message(coordinator: Coordinator) -> str:
    return coordinator.snapshot().status.message or ""


def test_code_is_taken_once_and_the_status_says_what_the_job_waits_for(waiting: Coordinator) -> None:
    assert "waits for its code" in message(waiting)
    with waiting.client() as client:
        assert not client.has_code(DIGEST)
        assert send(waiting)[-1] == len(PACK)
        assert client.has_code(DIGEST)
    pack = waiting.rundir.pack(DIGEST)
    assert pack.read_bytes() == PACK
    before = pack.stat()
    send(waiting)
    assert pack.stat().st_ino == before.st_ino, "a second pack changes nothing"
    assert message(waiting) == ""
    assert any(f"its code has arrived: {DIGEST}" in event.text for event in waiting.snapshot().events)
    assert left(waiting) == [pack.name]


def test_no_other_code_is_taken_whoever_sends_it(waiting: Coordinator) -> None:
    for content, digest, token, why in (
        (PACK, OTHER, TOKEN, f"this job's code is {DIGEST}, and no other is taken"),
        (PACK[:-1] + b"?", DIGEST, TOKEN, "send it again"),
        (PACK, DIGEST, "another token of a job", "token"),
        (PACK, "../../job.json", TOKEN, "Not Found"),
    ):
        with pytest.raises((CoordinatorRefused, Unreachable)) as error:
            send(waiting, content, digest, token)
        assert why in str(error.value)
        assert left(waiting) == []
    status, answer = waiting.raw("PUT", f"/v1/code/{DIGEST}", **{"Content-Length": str(MAX_PACKED_BYTES + 1)})
    assert (status, "at most" in answer["error"]) == (400, True)
    assert waiting.raw("GET", f"/v1/code/{DIGEST}")[1] == {"present": False}


def test_more_than_the_most_is_refused_on_the_way_also_where_no_length_is_said(waiting: Coordinator) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", waiting.port, timeout=60)
    pieces = (bytes(2**20) for _ in range(MAX_PACKED_BYTES // 2**20 + 2))
    try:
        connection.request(
            "PUT", f"/v1/code/{DIGEST}", pieces, {"Authorization": f"Bearer {TOKEN}"}, encode_chunked=True
        )
    except ConnectionError:
        pass  # it has hung up meanwhile
    else:
        assert b"at most" in connection.getresponse().read()
    connection.close()
    assert left(waiting) == []


def test_a_sender_that_is_cut_off_leaves_nothing_and_the_next_one_is_served(waiting: Coordinator) -> None:
    with socket.create_connection(("127.0.0.1", waiting.port), timeout=10) as connection:
        head = f"PUT /v1/code/{DIGEST} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        connection.sendall(f"{head}Content-Length: {len(PACK)}\r\n\r\n".encode() + PACK[: len(PACK) // 2])
        until(lambda: any(name.startswith(TEMPORARY) for name in left(waiting)), "half of a pack on the disk", 20.0)
    until(lambda: left(waiting) == [], "an end to the half", 20.0)
    send(waiting)
    assert waiting.rundir.pack(DIGEST).read_bytes() == PACK


def test_submit_watches_for_the_coordinator_instead_of_asking_again_and_again(tmp_path: Path) -> None:
    folder = coded.write(tmp_path / "code")
    file = tmp_path / "job.json"
    file.write_text(json.dumps(coded.manifest("digits", steps=1)))
    with packed(folder) as pack:
        digest = pack.digest
    (tmp_path / "bin").mkdir()
    fake = FakeKubectl(tmp_path / "bin")
    found = Coordinator(tmp_path, trainer={"command": ["train.py"], "code": digest}).start()
    made = fake_job("digits", phase="Pending")
    fake.answers("get", "distributedtrainingjobs.tandem.dev", says=made)
    fake.answers("apply", says=made)
    fake.answers("get", "secret", says={"data": {"token": base64.b64encode(TOKEN.encode()).decode()}})
    fake.answers("port-forward", complains="error: unable to forward port because pod is not running")
    fake.answers("wait", stays=True)
    with ThreadPoolExecutor() as threads:
        words = ("submit", str(file), "--code", str(folder))
        submitting = threads.submit(lambda: tandem(*words, variables={"PATH": fake.path}))
        (watch,) = until(lambda: [one for one in fake.asked if "wait" in one.words], "a watch")
        assert "--selector=tandem.dev/job=digits,tandem.dev/role=coordinator" in watch.words
        assert sum("port-forward" in one.words for one in fake.asked) == 1
        fake.answers("port-forward", says=f"Forwarding from 127.0.0.1:{found.port} -> 7070\n", stays=True)
        os.kill(watch.pid, signal.SIGKILL)
        done = submitting.result()
    found.kill()
    assert done.returncode == 0, done.stderr
    assert "the code was sent in" in done.stdout


def test_submit_sends_the_folder_once_through_kubectl_to_the_coordinator_of_its_job(tmp_path: Path) -> None:
    folder = coded.write(tmp_path / "code")
    file = tmp_path / "job.json"
    file.write_text(json.dumps(coded.manifest("digits", steps=1)))
    with packed(folder) as pack:
        digest, bytes_of_pack = pack.digest, pack.file.read_bytes()
    (tmp_path / "bin").mkdir()
    fake = FakeKubectl(tmp_path / "bin")
    found = Coordinator(tmp_path, trainer={"command": ["train.py"], "code": digest}).start()
    try:
        made = fake_job("digits", phase="Pending")
        fake.answers("get", "distributedtrainingjobs.tandem.dev", says=made)
        fake.answers("apply", says=made)
        fake.answers("get", "secret", says={"data": {"token": base64.b64encode(TOKEN.encode()).decode()}})
        fake.answers("port-forward", says=f"Forwarding from 127.0.0.1:{found.port} -> 7070\n", stays=True)
        for said in ("the code was sent in", "the code is on the job's volume already"):
            done = tandem("submit", str(file), "--code", str(folder), variables={"PATH": fake.path})
            assert done.returncode == 0, done.stderr
            assert said in done.stdout
            assert f"{digest}, 7 files" in done.stdout
        assert found.rundir.pack(digest).read_bytes() == bytes_of_pack
        (applied, _) = (json.loads(one.given) for one in fake.asked if "apply" in one.words)
        assert applied["spec"]["trainer"]["code"] == digest
        dry = tandem("submit", str(file), "--code", str(folder), "--dry-run", variables={"PATH": fake.path})
        assert dry.returncode == 0, dry.stderr
        assert sum("port-forward" in one.words for one in fake.asked) == 2, "a dry run sends nothing"

        (folder / "parts" / "setting.py").write_text("VALUE = 9\n")
        refused = tandem("submit", str(file), "--code", str(folder), variables={"PATH": fake.path})
        assert refused.returncode == 2
        assert "digits refused this code: the coordinator at" in refused.stderr
        assert f"this job's code is {digest}, and no other is taken" in refused.stderr
    finally:
        found.kill()


def test_a_job_without_code_takes_none(tmp_path: Path) -> None:
    found = Coordinator(tmp_path).start()
    try:
        with pytest.raises(CoordinatorRefused, match="this job has no code"):
            send(found)
        assert found.snapshot().status.message is None
    finally:
        found.kill()


def test_a_folder_runs_with_its_modules_and_packages_and_again_with_an_edited_line(tmp_path: Path) -> None:
    folder = coded.write(tmp_path / "code", value=1)
    (folder / "evaluate.py").write_text(
        "import json, os, parts.setting, tiny_thing\n"
        "print(f'evaluated value={parts.setting.VALUE} in={os.getcwd()}', flush=True)\n"
        "open(os.environ['TANDEM_REPORT'], 'w').write(json.dumps({'loss': 1.0}))\n"
    )
    script = (folder / "train.py").read_text()
    save = "if dist.get_rank() == 0:\n    pathlib.Path(sys.argv[2], 'out').mkdir(exist_ok=True)\n"
    save += "    from safetensors.torch import save_file\n"
    save += "    save_file({'w': total}, pathlib.Path(sys.argv[2], f'out/step-{VALUE}.safetensors'))\n"
    (folder / "train.py").write_text(script + save)
    file = tmp_path / "job.json"
    whole = coded.manifest("coded", steps=1, workers=1)
    whole["spec"]["trainer"]["args"] = ["1", str(tmp_path / "run")]
    file.write_text(json.dumps(whole))

    for value in (1, 2):
        (folder / "parts" / "setting.py").write_text(f"VALUE = {value}\n")
        run = LocalRun(tmp_path, "--code", str(folder), manifest=file, cwd=tmp_path)
        assert run.ends() == 0, run.output
        log = (run.run_dir.log / "worker-0.txt").read_text()
        assert log.count(f"first-step value={value} answer=42 sum=1") == 1, log
        digest = run.run_dir.read_job().spec.trainer.code
        assert digest is not None
        assert f"event=code digest={digest}" in log
        evaluated = (run.run_dir.log / "evaluator-0-0.txt").read_text()
        assert f"evaluated value={value} in=" in evaluated
        assert f"event=code digest={digest}" in evaluated
        assert f"code: {digest}, 7 files" in run.output
        assert run.run_dir.pack(digest).exists()
    assert len(list(run.run_dir.code.glob("*.tar.gz"))) == 2, "the packs of both stay with the run"


def test_requirements_that_cannot_be_installed_end_a_run_with_one_sentence(tmp_path: Path) -> None:
    folder = coded.write(tmp_path / "code")
    (folder / "requirements.txt").write_text("--no-index\nno-such-package==9\n")
    (tmp_path / "job.json").write_text(json.dumps(coded.manifest("coded", steps=1, workers=1)))
    run = LocalRun(tmp_path, "--code", str(folder), manifest=tmp_path / "job.json", cwd=tmp_path)
    assert run.ends() == 2
    assert "requirements.txt cannot be installed: No matching distribution found for no-such-package==9" in run.output
    assert str((run.run_dir.failed() or {})["message"]).startswith("requirements.txt cannot be installed: No matching")
    assert "Traceback" not in run.output
    assert (run.run_dir.log / "worker-0.txt").read_text().count("event=install ") == 1, "it is not tried again"


def test_what_cannot_be_packed_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    folder = coded.write(tmp_path / "code")
    (tmp_path / "job.json").write_text(json.dumps(coded.manifest("coded", steps=1)))
    with (folder / "data.bin").open("wb") as file:
        file.truncate(2 * 10**9)
    for command in ("run", "submit"):
        refused = tandem(command, str(tmp_path / "job.json"), "--code", str(folder), cwd=tmp_path)
        assert refused.returncode == 2
        assert "data.bin (2.0 GB)" in refused.stderr
    (folder / "data.bin").unlink()
    (folder / ".gitignore").write_text("train.py\n")
    refused = tandem("run", str(tmp_path / "job.json"), "--code", str(folder), cwd=tmp_path)
    assert refused.returncode == 2
    assert "train.py is excluded by .gitignore" in refused.stderr
    assert not (tmp_path / "runs").exists()
