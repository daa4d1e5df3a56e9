"""Service discovery on one machine: commands find the clusters that the same user runs here.

A scheduler writes its address to a file in a directory that only its user can enter, and holds a lock on that
file (flock(2)) until it ends. The kernel releases the lock however a process ends. So a file that nobody has
locked was left by a scheduler that was killed: whoever reads it removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from zenps.config.settings import ClusterConfig, Config
from zenps.config.sources import Loaded
from zenps.errors import ConfigError, listing

logger = logging.getLogger("zenps.cli")

_MAX_BYTES: Final = 1 << 16
"""How much of a file is read; no scheduler writes more."""


def options_for(address: str, job: str) -> str:
    """Returns the options of a shell's command line with which ``zenps status`` asks about this job."""
    sets = [f"cluster.scheduler={address}"]
    sets += [] if job == ClusterConfig().job else [f"cluster.job={job}"]
    return " ".join(f"--set {shlex.quote(item)}" for item in sets)


class LocalCluster(msgspec.Struct, frozen=True):
    """A scheduler's description of its cluster. Nothing in it is secret.

    Attributes:
        address: ``host:port`` of the scheduler.
        job: ``cluster.job``.
        workers, servers: how many the cluster was started for.
        folder: the working directory of the scheduler, which helps the user to recognise the cluster.
    """

    address: str
    job: str
    workers: int
    servers: int
    folder: str

    def __str__(self) -> str:
        options = options_for(self.address, self.job)
        return f"{options} ({self.workers} worker(s), {self.servers} server(s), started in {self.folder!r})"

    def configure(self, config: Config) -> Config:
        """Returns ``config`` with the settings with which an admin client reaches this cluster."""
        own = {"scheduler": self.address, "job": self.job, "workers": self.workers, "servers": self.servers}
        return msgspec.structs.replace(config, cluster=msgspec.structs.replace(config.cluster, **own))


# ── what a scheduler does ───────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def published(cluster: ClusterConfig, address: str) -> Iterator[None]:
    """Lets this user's commands find, within the context, the cluster whose scheduler listens at ``address``.

    If no directory can be written, the scheduler runs all the same, and the commands need its address.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = os.fsencode(os.getcwd()).decode(errors="replace")  # any bytes may name a folder
            own = LocalCluster(address, cluster.job, cluster.workers, cluster.servers, folder)
            stack.enter_context(_locked_file(msgspec.json.encode(own)))
        except OSError as error:
            logger.info("zenps status on this machine needs the address of this scheduler: %s", error)
        yield


@contextlib.contextmanager
def _locked_file(content: bytes) -> Iterator[None]:
    """A file with ``content``, locked and visible to readers within the context."""
    descriptor, draft = tempfile.mkstemp(prefix=".", dir=_make_directory())
    # Readers look for the ending: they see the file when it has its lock and all of its content.
    path = Path(draft).with_name(f"{Path(draft).name[1:]}.json")
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, content)
            os.rename(draft, path)
        except BaseException:  # Ctrl-C too: nobody else would remove the draft
            os.unlink(draft)
            raise
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _make_directory() -> Path:
    directory = _directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"expected {directory} to be a directory that this user alone can enter")
    return directory


def _directory() -> Path:
    """Where the files are. ``XDG_RUNTIME_DIR`` would not do: it is removed when the user logs out."""
    return Path(tempfile.gettempdir(), f"zenps-{os.geteuid()}")


def _is_private(directory: Path) -> bool:
    """True if only this user can enter it. Anybody may create a directory of that name in ``/tmp``."""
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def write_address(descriptor: int | None, address: str) -> None:
    """Writes ``address`` to the file descriptor of ``--print-address``, if there is one, and closes it.

    Raises:
        ConfigError: it is not open.
    """
    if descriptor is None:
        return
    try:
        os.write(descriptor, f"{address}\n".encode())
        os.close(descriptor)
    except (OSError, OverflowError) as error:
        allowed = f"an open file descriptor ({getattr(error, 'strerror', error)})"
        raise ConfigError("--print-address", descriptor, allowed) from error


# ── what the other commands do ──────────────────────────────────────────────────────────────────


def find_clusters(loaded: Loaded) -> list[LocalCluster]:
    """Returns the clusters that this user runs on this machine, in the order of their addresses.

    If ``cluster.job`` was set, these are the clusters of that job.
    """
    try:
        directory = _directory()
        paths = list(directory.glob("*.json")) if _is_private(directory) else []
    except OSError:  # there is none, so this user has started no cluster
        return []
    found = [cluster for path in paths if (cluster := _read(path)) is not None]
    if loaded.sources["cluster.job"] != "default":
        found = [cluster for cluster in found if cluster.job == loaded.config.cluster.job]
    return sorted(found, key=lambda cluster: cluster.address)


def _read(path: Path) -> LocalCluster | None:
    """Returns the cluster of a file. None if its scheduler has ended, or is of another version of ZenPS."""
    try:
        with path.open("rb") as file:
            try:
                # Shared, so that another reader does not take this lock for that of a scheduler.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=LocalCluster)
        path.unlink(missing_ok=True)
    except (OSError, msgspec.DecodeError) as error:
        logger.debug("%s: %s", path, error)
    return None


def find_cluster(loaded: Loaded) -> LocalCluster:
    """Returns the only cluster that :func:`find_clusters` finds.

    Raises:
        ConfigError: there is none, or there are several; the message says what to do.
    """
    found = find_clusters(loaded)
    if not found:
        expected = "'host:port' of the scheduler, because no cluster of yours was found on this machine"
        how = "set it by --set, ZENPS_CLUSTER_SCHEDULER or zenps.toml; zenps launch starts a cluster"
        raise ConfigError("cluster.scheduler", "", f"{expected}; {how}")
    if len(found) > 1:
        choices = listing(found, "; ")
        raise ConfigError("cluster.scheduler", "", f"one of {len(found)} clusters on this machine: {choices}")
    return found[0]
