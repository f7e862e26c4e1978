"""`launch.sh run --hosts` from a recording:  python -m tests.support.hosts_worker CONFIG HOSTFILE [key=value …]

As launcher.run starts it, without what needs a sampler, in whose place a process sleeps.
"""

import sys
from pathlib import Path

from common.config import load
from common.durable import lock
from common.errors import Retryable, UserError
from common.files.run_folder import FINAL
from common.processes.exits import RETRYABLE, USER_ERROR, say
from launcher.hosts.hosts import HostCommands, meeting, read_hosts
from launcher.hosts.over_hosts import answers
from launcher.processes.processes import Child
from launcher.processes.supervisor import Rules, Supervisor
from launcher.run import LOCK, in_use


def main(path: Path, hostfile: Path, overrides: list[str]) -> int:
    config, hosts = load(path, overrides), read_hosts(hostfile)
    try:
        meet = meeting(hosts, answers([host.name for host in hosts]))
    except (UserError, Retryable) as error:
        say(str(error))
        return RETRYABLE if isinstance(error, Retryable) else USER_ERROR
    commands = HostCommands(path, overrides, config, hosts, meet)
    folder = config.run.output_dir
    idle = Child("sampler", ("sleep", "1000"), {}, folder / "logs" / "sampler.log")
    rules = Rules(commands.restart_trainer, commands.steps, (folder / FINAL).is_dir, grace_s=5.0)
    with lock(folder / LOCK, in_use(folder)):
        return Supervisor([idle], commands.trainer(), rules).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
