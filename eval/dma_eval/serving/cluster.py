"""A Ray cluster, new or existing, and the application of :mod:`.replicas` on it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray
from ray import serve
from ray.exceptions import RayError

from dma_eval.errors import UserError, one_line

from .replicas import QUIET, Model, make_application
from .settings import APPLICATION, Settings

POLL_SECONDS, CONNECT_SECONDS = 1.0, 10.0


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Start Ray on this machine or join the cluster at an address, and stop the application at the end of the block.

    Ray Serve then takes no new requests, and open ones have the time of the settings to end.

    Raises:
        UserError: There is no cluster at the address.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"logging_level": logging.ERROR, "configure_logging": True}
    try:
        if address is None:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            host, _, port = address.rpartition(":")
            if host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            ray.init(address, **quiet)
    except (OSError, RayError, ValueError) as error:
        raise UserError(f"--ray-address: {one_line(error)}") from error
    try:
        yield
    finally:
        while APPLICATION in serve.status().applications:
            with suppress(TimeoutError):  # of a minute, which may be less than the drain
                serve.delete(APPLICATION)
        ray.shutdown()


def has_gpus() -> bool:
    """Return whether a node of the cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU"))


def check_resources(settings: Settings) -> None:
    """Check that this machine can run the replicas. Another cluster may add nodes.

    Raises:
        UserError: It has too few CPUs or GPUs.
    """
    found = ray.cluster_resources()
    for kind, each in (("CPU", settings.tensor_parallel), ("GPU", settings.gpus_per_replica)):
        if settings.replicas * each > found.get(kind, 0):
            raise UserError(
                f"--replicas: {settings.replicas} need {settings.replicas * each:g} {kind}s, and Ray finds "
                f"{found.get(kind, 0):g} here; give fewer --replicas, or less --tensor-parallel or --gpus-per-replica"
            )


def start(settings: Settings, *, host: str, port: int, api_key: str | None) -> None:
    """Start the replicas, and wait until they are ready.

    Raises:
        UserError: The model does not load.
    """
    serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
    try:
        serve.run(make_application(settings, api_key), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        message = serve.status().applications[APPLICATION].deployments[Model.__name__].message
        *_, reason = [one_line(error), *filter(None, message.splitlines())]  # the last line of a traceback
        raise UserError(f"the replicas did not start: {reason.strip()}") from error


def wait() -> None:
    """Wait until this process is interrupted.

    Raises:
        UserError: The application ended by itself.
    """
    with suppress(KeyboardInterrupt):  # how a server is stopped
        while APPLICATION in serve.status().applications:
            time.sleep(POLL_SECONDS)
        raise UserError("the application was deleted from the cluster")
