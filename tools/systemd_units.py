"""Starts the systemd units of a new federation in a copy of this machine, trains, and checks what a site can write.

    python tools/systemd_units.py

Requires root, nginx, and systemd-nspawn (Debian: apt install systemd-container). The copy is an overlay in memory of
this machine's files, with a real systemd and a loopback interface only; nothing outside it changes. The units run as
their comments say: as the user keel, with Python and Keel in /opt/keel, in /var/lib/ward-nine. Server and three sites
share that folder here. The command exits with 1 if a unit does not start, the training does not finish, or a site's
process can write what it should not.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

NAME, SITES = "ward-nine", 3
FOLDER = f"/var/lib/{NAME}"
PATIENCE_SECONDS = 300
SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGES = " ".join(path for path in sys.path if path.endswith("site-packages"))
ENVIRONMENT = "PATH=/opt/keel/bin:/usr/sbin:/usr/bin:/bin LD_LIBRARY_PATH=/opt/python/lib FLWR_TELEMETRY_ENABLED=0"
AS_KEEL = f"setpriv --reuid keel --regid keel --clear-groups env HOME={FOLDER} FLWR_HOME={FOLDER}/.flwr {ENVIRONMENT}"
WRITABLE = f"{FOLDER}/client-state/probe", "/var/tmp/probe"
CLOSED = (
    f"{FOLDER}/site.toml",
    f"{FOLDER}/approved/probe",
    f"{FOLDER}/keys/site-0",
    f"{FOLDER}/certificates/ca.crt",
    f"{FOLDER}/.flwr-site-1/probe",
    "/srv/patients/probe",
    "/opt/keel/probe",
    "/home/probe",
    "/root/probe",
)
"""What a site's process can write, and what it cannot."""
SEEN = ("/srv/patients/patients.csv",)
HIDDEN = "/srv/payroll/salaries.csv", "/mnt/backup.csv"
"""What a site's process can read, and what it cannot, although every user of the machine can."""
INSTALL = f"""set -e
useradd --system keel
mkdir -p /opt/python /etc/keel /srv/patients /srv/payroll
touch /srv/patients/patients.csv /srv/payroll/salaries.csv /mnt/backup.csv
cp -a {sys.base_prefix}/. /opt/python
/opt/python/bin/python3 -m venv --without-pip /opt/keel
printf '%s\\n' /source {PACKAGES} > /opt/keel/lib/python3.{sys.version_info.minor}/site-packages/keel.pth
for script in keel flwr flower-superexec flower-superlink flower-supernode flwr-serverapp flwr-clientapp; do
    sed '1s|.*|#!/opt/keel/bin/python|' {Path(sys.executable).parent}/$script > /opt/keel/bin/$script
    chmod 755 /opt/keel/bin/$script
done
cd /var/lib
{ENVIRONMENT} keel deploy new {NAME} --sites {SITES} > /dev/null
cp {NAME}/systemd/*.service /etc/systemd/system
for unit in keel-server keel-site@; do
    mkdir -p /etc/systemd/system/$unit.service.d
    printf '[Service]\\nEnvironment=LD_LIBRARY_PATH=/opt/python/lib\\n' > /etc/systemd/system/$unit.service.d/a.conf
done
chown -R keel: {NAME}
cd {NAME}
{AS_KEEL} keel deploy certificates 127.0.0.1
for site in $(seq 0 {SITES - 1}); do
    printf 'SERVER=127.0.0.1:8443\\nSETTINGS=synthetic=true device="cpu"\\n' > /etc/keel/site-$site.env
    {AS_KEEL} keel deploy key keys/site-$site
    {AS_KEEL} keel deploy site-certificate $site
done
{AS_KEEL} keel deploy approve . --yes > /dev/null
systemctl daemon-reload
systemctl start keel-server keel-proxy
"""
START = f"""set -e
cd {FOLDER}
for site in $(seq 0 {SITES - 1}); do
    {AS_KEEL} flwr supernode register keys/site-$site.pub federation
    systemctl start keel-site@$site
done
{AS_KEEL} flwr run . federation -c 'rounds=2'
"""


class Machine:
    """A copy of this machine, booted with systemd-nspawn."""

    def __init__(self, folder: Path, undo: ExitStack):
        parts = {name: folder / name for name in ("memory", "root")}
        for part in parts.values():
            part.mkdir()
        memory, root = parts["memory"], parts["root"]
        run("mount", "-t", "tmpfs", "tmpfs", str(memory))
        undo.callback(run, "umount", "--lazy", str(memory))
        for name in "upper", "work":
            (memory / name).mkdir()
        layers = f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
        undo.callback(run, "umount", "--lazy", str(root))
        (root / "etc" / "fstab").write_text("")
        command = f"systemd-nspawn --quiet --directory={root} --boot --private-network --register=no --keep-unit"
        command += f" --link-journal=no --console=pipe --machine=keel-units --bind-ro={SOURCE}:/source"
        output = (folder / "boot.log").open("wb")
        self.process = subprocess.Popen(command.split(), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        undo.callback(self.stop)
        wait_until("systemd runs", lambda: self.call("systemctl is-system-running").stdout.strip() in STARTED)

    def leader(self) -> int:
        """Return the ID of the machine's first process, with which all others of the machine end; 0 if it has none."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(listing[0]) if listing else 0

    def stop(self) -> None:
        if leader := self.leader():
            os.kill(leader, signal.SIGKILL)
        self.process.wait()

    def call(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script in the machine, as root."""
        enter = ["nsenter", "--target", str(self.leader()), "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"]
        return subprocess.run([*enter, "sh", "-c", script], capture_output=True, text=True, check=False)

    def do(self, script: str) -> str:
        done = self.call(script)
        if done.returncode:
            sys.exit(f"failed: {script}\n{done.stdout}{done.stderr}{self.call('journalctl --no-pager -n 50').stdout}")
        return done.stdout


STARTED = "running", "degraded"
"""States of a systemd that has booted; degraded if a unit of this machine cannot run in the copy."""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within {PATIENCE_SECONDS} s: {what}")
        time.sleep(0.5)


def main() -> None:
    if os.geteuid() != 0 or shutil.which("systemd-nspawn") is None:
        sys.exit("requires root and systemd-nspawn (Debian: apt install systemd-container)")
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="keel-units-")))
        machine = Machine(folder, undo)
        machine.do(INSTALL)
        listing = f"cd {FOLDER}; {AS_KEEL} flwr supernode list federation"
        wait_until("the server answers", lambda: machine.call(listing).returncode == 0)
        machine.do(START)
        status = f"cd {FOLDER}; {AS_KEEL} keel deploy status runs/first"
        wait_until("the training finishes", lambda: "finished after 2 of 2" in machine.call(status).stdout)
        units = ["keel-server", "keel-proxy", *(f"keel-site@{site}" for site in range(SITES))]
        for unit in units:
            state = machine.call(f"systemctl is-active {unit}").stdout.strip()
            restarts = machine.call(f"systemctl show {unit} -p NRestarts --value").stdout.strip()
            print(f"{unit}: {state}, {restarts} restarts")
            if (state, restarts) != ("active", "0"):
                sys.exit(machine.call(f"journalctl --no-pager -u {unit}").stdout)
        print(machine.do(status).strip())
        leader = machine.do("systemctl show keel-site@0 -p MainPID --value").strip()
        enter = f"nsenter --target {leader} --mount setpriv --reuid keel --regid keel --clear-groups --no-new-privs"
        wrong = [path for path in CLOSED if not machine.call(f"{enter} sh -c ': >> {path}'").returncode]
        wrong += [path for path in WRITABLE if machine.call(f"{enter} sh -c ': >> {path}'").returncode]
        visible = [path for path in HIDDEN if not machine.call(f"{enter} cat {path}").returncode]
        visible += [path for path in SEEN if machine.call(f"{enter} cat {path}").returncode]
        limits = machine.do(f"grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/{leader}/status")
        print(" ".join(limits.split()))
        if wrong or visible:
            sys.exit(f"wrong permissions: {', '.join([*wrong, *visible])}")
        print(f"a site's process writes {', '.join(WRITABLE)}, and none of {', '.join(CLOSED)}")
        print(f"it reads {', '.join(SEEN)}, and none of {', '.join(HIDDEN)}")


if __name__ == "__main__":
    main()
