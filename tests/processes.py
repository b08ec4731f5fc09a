"""Processes seen from outside: trees of them, listening sockets, and the time that something takes."""

import re
import time
from pathlib import Path


def wait_for(condition, seconds, what):
    """Polls until ``condition()`` is true; returns the seconds it took. An AssertionError names ``what`` if never."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.002)
    return time.monotonic() - start


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def tree(root):
    """``root`` and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def named(pids, word):
    """Those of ``pids`` of whose command line ``word`` is a part."""
    return [pid for pid in pids if word in command(pid)]


def command(pid):
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def sockets():
    """inode -> (address in hexadecimal, port) of every listening socket of this machine."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                found[fields[9]] = (address, int(port, 16))
    return found


def listening(pids):
    """inode -> (address, port) of the sockets on which processes of ``pids`` listen."""
    by_inode = sockets()
    held = {match[1] for pid in pids for match in descriptors(pid) if match}
    return {inode: by_inode[inode] for inode in held & by_inode.keys()}


def descriptors(pid):
    """Open files of a process, matched with sockets; none for one that is gone."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            yield re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
        except OSError:
            continue


def is_loopback(address):
    """127.0.0.1, also written as an IPv6 address, or ::1, as /proc/net/tcp6 writes them."""
    return address in ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def writing_to(log):
    """Processes whose standard output is this file."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if link.readlink() == log:
                found.append(int(link.parts[2]))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found
