"""Servers beside a job on this machine: found, started again, and gone with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_nb import addresses, keeper, services
from megatron_nb.client import ClientConfig
from megatron_nb.config import compose, flatten
from megatron_nb.launch import LaunchConfig
from megatron_nb.rl import RlConfig
from megatron_nb.schema import ConfigError, build, plain
from megatron_nb.services import ServiceConfig
from megatron_nb.slurm import Job, SlurmConfig

SERVER = """
import http.server, os, sys, threading, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(float(os.environ.get("DELAY_S", 0)) if os.path.exists(sys.argv[2]) else 0)
        self.send_response(200), self.end_headers(), self.wfile.write(b"fine, thank you")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run folder, and this process a rank of its job."""
    (tmp_path / "server.py").write_text(SERVER)
    folder = tmp_path / "run"
    monkeypatch.setenv(addresses.FOLDER, str(folder / "services"))
    monkeypatch.setenv(addresses.START, "7.0")
    monkeypatch.setenv(addresses.TOKEN, "secret")
    monkeypatch.delenv(services.ADDRESSES, raising=False)
    return folder


def service(run, *words, **settings) -> ServiceConfig:
    command = ["python", str(run.parent / "server.py"), "{port}", str(run.parent / "slow"), *words]
    return ServiceConfig(command=command, **settings)


class Kept:
    """One keeper in a process of its own."""

    def __init__(self, run, config, name="engine"):
        self.path = run / "services" / f"{name}-0.json"
        services.write_plan(run, plain({name: config}))
        self.process = subprocess.Popen([sys.executable, "-m", "megatron_nb.keeper", str(run), name])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGUSR2)
        self.process.wait(60)

    @property
    def record(self) -> dict:
        return json.loads(self.path.read_text()) if self.path.exists() else {"state": ""}

    def until(self, true, seconds=60) -> dict:
        end = time.monotonic() + seconds
        while not true(self.record):
            assert time.monotonic() < end, self.record
            time.sleep(0.05)
        return self.record


def test_the_engine_s_servers_without_a_model_to_start_from_name_the_key_that_gives_it():
    with pytest.raises(ValueError, match=r"launch\.services\.engine: values\.model is null: .*give init_from=FOLDER"):
        compose(RlConfig, "rl_pointwise", ["+services=engine"])
    config = compose(RlConfig, "rl_pointwise", ["+services=engine", "init_from=models/base"])
    assert config.launch.services["engine"].values["model"] == "models/base"


def test_a_server_that_is_killed_is_started_again_at_the_same_address(run):
    with Kept(run, service(run)) as kept:
        services.wait({"engine": service(run)}, loud=False)
        before = kept.record
        os.kill(before["pid"], signal.SIGKILL)
        after = kept.until(lambda record: record["state"] == "up" and record["restarts"] == 1)
        assert after["url"] == before["url"] == addresses.url_of("service:engine") and after["pid"] != before["pid"]
    assert kept.record["state"] == "stopped" and not psutil.pid_exists(after["pid"])
    assert "start 2 on" in (run / "logs" / "services" / "engine-0.log").read_text()


def test_a_server_that_hangs_is_started_again(run, monkeypatch):
    config = service(run, hung_s=1.0, environment={"DELAY_S": 60})
    monkeypatch.setattr(keeper, "HEALTH_S", 0.2)
    monkeypatch.setattr(keeper, "ANSWER_S", 0.5)
    told = []
    one = keeper.Keeper(run, "engine", 0, config)
    write = one._write

    def note(state, said):
        told.append((state, said))
        write(state, said)
        if state == "up":
            (run.parent / "slow").touch()
        if state == "down":
            one.stopping = True

    one._write = note
    services.write_plan(run, {})
    assert one.keep() == 0
    assert [state for state, _ in told] == ["starting", "up", "down", "stopped"]
    assert "has not been healthy for hung_s=1" in told[2][1]


@pytest.mark.parametrize(
    ("command", "said"),
    [(["python", "-c", "exit(3)", "{port}"], "it ended with 3"), (["/no/such", "{port}"], "cannot be started")],
)
def test_a_server_that_cannot_live_is_given_up_and_whoever_waits_is_told(run, command, said):
    config = ServiceConfig(command=command, restarts=1)
    with Kept(run, config) as kept:
        with pytest.raises(ConfigError, match=f"engine-0 was given up.*{said}.*engine-0.log"):
            services.wait({"engine": config}, loud=False)
        assert kept.process.wait(60) == 1


def test_a_server_that_nobody_starts_is_told_of(run):
    with pytest.raises(ConfigError, match="engine-0 was not begun in start_s=0.1"):
        services.wait({"engine": service(run, start_s=0.1)}, loud=False)


def test_addresses_of_an_earlier_start_are_not_taken(run):
    (run / "services").mkdir(parents=True)
    for replica, start in ((0, "7.0"), (1, "6.0"), (2, "7.0")):
        record = {"name": "judge", "replica": replica, "url": f"http://h:{replica}", "start": start}
        (run / "services" / f"judge-{replica}.json").write_text(json.dumps(record))
    assert addresses.expanded(["http://a", "service:judge"]) == ["http://a", "service:judge/0", "service:judge/2"]
    assert [addresses.url_of(url) for url in ("service:judge/2", "http://a")] == ["http://h:2", "http://a"]
    with pytest.raises(ValueError, match="tells of no such server"):
        addresses.url_of("service:search")


def test_ranks_take_turns_over_the_replicas_of_one_address(run, monkeypatch):
    (run / "services").mkdir(parents=True)
    for replica in range(2):
        record = {"name": "teacher", "replica": replica, "url": f"http://h:{replica}", "start": "7.0"}
        (run / "services" / f"teacher-{replica}.json").write_text(json.dumps(record))
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        found.append(addresses.url_of("service:teacher"))
    assert found == ["http://h:0", "http://h:1", "http://h:0"]


def test_the_token_of_a_job_goes_to_its_own_servers_only(run):
    assert addresses.token_for("service:judge/0", None) == "secret"
    assert addresses.token_for("http://elsewhere", None) is None


def test_an_address_outside_of_a_job_says_what_starts_it(monkeypatch):
    monkeypatch.delenv(addresses.FOLDER, raising=False)
    ClientConfig("service:judge")  # fit for a dry run
    with pytest.raises(ValueError, match="see launch.services"):
        addresses.url_of("service:judge")


# ---------------------------------------------------------------------- a whole job
JOB = """
import os, sys, time, urllib.request
from megatron_nb import addresses, services
services.wait({"engine": services.ServiceConfig(["a", "{port}"])}, loud=False)
print(urllib.request.urlopen(addresses.url_of("service:engine")).read().decode(), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""
LAUNCH = """
import json, sys
from pathlib import Path
from megatron_nb import services
from megatron_nb.schema import build
run = Path(sys.argv[1])
wanted = {"engine": build(services.ServiceConfig, json.loads(sys.argv[2]))}
sys.exit(services.run_beside(run, wanted, [sys.executable, *sys.argv[3:]]))
"""


def launched(run, *words) -> subprocess.Popen:
    (run.parent / "job.py").write_text(JOB)
    command = [sys.executable, "-c", LAUNCH, str(run), json.dumps(plain(service(run))), str(run.parent / "job.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def mine(run) -> list[psutil.Process]:
    """Servers and keepers of this run."""
    found = [one for one in psutil.process_iter() if str(run.parent) in " ".join(_words(one))]
    return [one for one in found if one.pid != os.getpid() and one.status() != psutil.STATUS_ZOMBIE]


def _words(process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_job_on_this_machine_finds_its_servers_which_end_with_it(run):
    job = launched(run, "0", "5")
    said, _ = job.communicate(timeout=120)
    assert (said, job.returncode) == ("fine, thank you\n", 5)
    assert mine(run) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_server_stays_when_the_job_is_killed(run, number):
    job = launched(run, "600", "0")
    assert job.stdout.readline() == "fine, thank you\n"
    job.send_signal(number)
    job.wait(60)
    end = time.monotonic() + 60
    while mine(run):
        assert time.monotonic() < end, mine(run)
        time.sleep(0.1)


# ---------------------------------------------------------------------- configuration and script
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"command": []}, "command is empty"),
        ({"command": ["serve"]}, "has no {port}"),
        ({"command": ["serve", "{port}", "{modle}"], "values": {"model": "a"}}, "modle"),
        ({"command": ["serve", "{port}"], "nodes": -1}, "nodes=-1"),
        ({"command": ["serve", "{port}", "{model}"], "values": {"model": "???"}}, "engine.values.model must be given"),
    ],
)
def test_a_service_that_cannot_be_is_refused(given, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(LaunchConfig, {"services": {"engine": given}})


def test_an_address_that_no_service_has_is_named_with_its_key():
    known = {"engine": ServiceConfig(["serve", "{port}"])}
    services.check(known, {"engine": {"urls": ["service:engine"]}})
    with pytest.raises(ConfigError, match=r"judge.urls=service:jugde: launch.services has no 'jugde'; there are engine"):
        services.check(known, {"judge": {"urls": ["http://a", "service:jugde"]}})


def test_replicas_of_a_node_share_its_gpus(monkeypatch):
    monkeypatch.setenv(services.ADDRESSES, "n1=n1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    words = ["serve", "{port}"]
    assert keeper._devices(ServiceConfig(words, nodes=1, per_node=2)) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert keeper._devices(ServiceConfig(words, nodes=2)) == {}
    assert keeper._devices(ServiceConfig(words)) == {"CUDA_VISIBLE_DEVICES": ""}  # those are the ranks'


def test_replicas_share_the_gpus_of_a_node_that_slurm_does_not_hand_out(monkeypatch, tmp_path):
    monkeypatch.setenv(services.ADDRESSES, "n1=n1")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(keeper, "DEVICES", tmp_path)
    two = ServiceConfig(["serve", "{port}"], nodes=1, per_node=2)
    assert keeper._devices(two) == {}
    for name in (*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert keeper._devices(two) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_a_script_of_the_project_is_found_wherever_the_job_starts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("tools/serve.sh", "tools/vllm.sh"):
        assert os.access(keeper._program(name), os.X_OK)
    assert [keeper._program(name) for name in ("vllm", "/no/such", "tools/none.sh")] == ["vllm", "/no/such", "tools/none.sh"]
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "serve.sh").touch()
    assert keeper._program("tools/serve.sh") == "tools/serve.sh"  # one's own comes first


def test_vllm_is_that_of_the_environment_that_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, said in (("python", ""), ("vllm", "echo mine $*")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{said}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script = keeper._program("tools/vllm.sh")
    named = os.environ | {"SERVE_PYTHON": str(tmp_path / "bin" / "python")}
    assert subprocess.run([script, "serve", "m"], env=named, capture_output=True, text=True).stdout == "mine serve m\n"
    bare = os.environ | {"PATH": "/usr/bin:/bin", "SERVE_PYTHON": ""}
    assert "set SERVE_PYTHON" in subprocess.run([script, "serve"], env=bare, capture_output=True, text=True).stderr


def test_a_script_gives_services_their_nodes_behind_those_of_the_ranks(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("cpus_per_task: 96\ncontainer: {image: nb.sqsh}\n")
    words = ["serve", "it's", "{port}"]
    beside = {
        "engine": ServiceConfig(words, nodes=2, per_node=4), "judge": ServiceConfig(words),
        "teacher": ServiceConfig(words, nodes=1, image="vllm.sqsh"),
    }  # fmt: skip
    text = Job("a", "megatron_nb.rl", tmp_path, SlurmConfig(nodes=3, site=str(site)), "", services=beside).text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "#SBATCH --nodes=6\n" in text and "NB_NODES=3 " in text
    starts = [line for line in text.splitlines() if line.startswith("srun")]
    assert [line.partition("--nodelist=")[2] for line in starts] == [f'"$(nodes {p})" \\' for p in ("3 2", "0 1", "5 1")]
    for part in ("--ntasks=8 --ntasks-per-node=4 --cpus-per-task=24 ", "=vllm.sqsh", '--nodelist="$(nodes 0 3)"'):
        assert part in text
    assert text.count("export PYTHONPATH=") == 4  # ranks, and each keeper: an image of its own does not have this project
    bare = Job("a", "megatron_nb.rl", tmp_path, SlurmConfig(nodes=3, site=str(site)), "").text()
    assert "keeper" not in bare and "NB_SERVICES" not in bare and "--nodelist" not in bare


CODE = ["reward.terms.code.settings.judge.workers=1"]
READY = {
    "engine": ("rl_pointwise", ["init_from=A"], "engine.server.urls", ["service:engine"]),
    "judge": ("rl_code_pass_rate", CODE, "reward.terms.code.settings.judge.urls", ["service:judge"]),
    "search": ("rl_agentic", ["launch.services.search.values.index=A"], "agent.tools.service.base_url", "service:search"),
    "teacher": ("rl_pointwise", ["launch.services.teacher.values.model=A"], "launch.services.teacher.nodes", 1),
}


@pytest.mark.parametrize("name", READY)
def test_a_ready_made_service_is_chosen_by_one_word(name):
    stage, words, key, value = READY[name]
    config = compose(RlConfig, stage, [f"+services={name}", "prompts.sources.a.path=p.jsonl", *words])
    services.check(config.launch.services, config)
    assert flatten(config)[key] == value and list(config.launch.services) == [name]


def test_services_of_several_kinds_stand_beside_one_job():
    words = ["+services=[engine,judge]", "init_from=A", "prompts.sources.a.path=p.jsonl"]
    config = compose(RlConfig, "rl_code_pass_rate", words)
    assert list(config.launch.services) == ["engine", "judge"]
