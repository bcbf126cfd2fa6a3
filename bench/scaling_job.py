"""One start of a program as several ranks of this host: lines as they come, an end whatever the ranks do.

In:   a command a rank, its environment, limits. Out: each line that rank 0 prints, at once; why the job ended early, or "".
Next: scaling.py makes rows of the lines.

A job ends early where a rank fails (the others get a few seconds, then they are killed), where no line has come for `row_limit_s`, and
where the whole run's time is over. Ranks get sessions of their own, and what they started is killed with them.
"""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

GRACE_S = 8.0  # for ranks whose peer has failed: they have their own words to say


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher of one host gives a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def half_environment(rank: int, ranks: int) -> dict[str, str]:
    """NCCL takes the lower half of the ranks for one host, the upper for another, and has sockets between them."""
    return {
        "NCCL_HOSTID": f"half{rank * 2 // ranks}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def with_descendants(pids: list[int]) -> list[int]:
    """`pids` and every process that descends from them, parents first."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(int(words[1]), []).append(int(stat.parent.name))
    found = list(pids)
    for pid in found:
        found += children.get(pid, [])
    return found


def kill(processes: list[subprocess.Popen]) -> None:
    """Ends ranks and what they started. A process that has been waited for is not touched: its number may be another's."""
    running = [process.pid for process in processes if process.poll() is None]
    for pid in with_descendants(running):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for process in processes:
        process.wait()


def cause_in(text: str) -> str:
    """The line of a failed rank that says why, or its last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if "error:" in line or "Error:" in line:
            return line[:300]
    return lines[-1][:300] if lines else "it said nothing"


def run_job(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    on_line: Callable[[str], None],
    row_limit_s: float,
    end_at: float,
    cwd: pathlib.Path,
) -> str:
    """Runs a rank a command to the end. `end_at`: time.monotonic() at which the whole run ends. Returns "" or why it ended early.

    `on_line` gets lines of rank 0 only, in this thread; those that came before a failure are delivered.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        said = [pathlib.Path(folder) / f"rank{rank}" for rank in range(len(commands))]
        processes: list[subprocess.Popen] = []
        try:
            for rank, command in enumerate(commands):
                with open(said[rank], "w") as words:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=words,
                        text=True,
                        env={**os.environ, **environments[rank]},
                        cwd=cwd,
                        start_new_session=True,
                    )
                processes.append(process)
            stdout = processes[0].stdout

            def read() -> None:
                for line in stdout:
                    lines.put(line)
                lines.put(None)

            threading.Thread(target=read, daemon=True).start()
            return _watch(processes, said, lines, on_line, row_limit_s, end_at)
        finally:
            kill(processes)


def _watch(processes, said, lines, on_line, row_limit_s, end_at) -> str:
    last = time.monotonic()
    failed_at = None
    open_stream = True
    while True:
        try:
            line = lines.get(timeout=0.1)
            if line is None:
                open_stream = False
            else:
                last = time.monotonic()
                on_line(line)
            continue
        except queue.Empty:
            pass
        now = time.monotonic()
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed and failed_at is None:
            failed_at = now
        if None not in codes and not open_stream:
            break
        if failed_at is not None and now - failed_at > GRACE_S:
            break
        if now - last > row_limit_s:
            return f"no row within {row_limit_s:.0f} s: the job was ended"
        if now > end_at:
            return "the time of the whole run was over: the job was ended"
    if not failed:
        return ""
    # The first to fail was ended by its own fault; a killed one has no words.
    causes = {rank: cause_in(said[rank].read_text(errors="replace")) for rank in failed}
    rank = next((r for r in failed if "error" in causes[r].lower()), failed[0])
    return f"rank {rank} ended with {codes[rank]}: {causes[rank]}"
