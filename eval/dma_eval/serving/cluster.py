"""A Ray cluster, new or existing, and the application of :mod:`.replicas` on it."""

from __future__ import annotations

import logging
import socket
import time

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from dma_eval.errors import UserError, one_line

from .gate import log
from .replicas import CANCEL_SECONDS, Model, make_application
from .settings import APPLICATION, Settings

POLL_SECONDS, CONNECT_SECONDS = 1.0, 10.0


class Cluster:
    """Start Ray on this machine or join the cluster at an address, and stop the application at the end of the block.

    Raises:
        UserError: There is no cluster at the address.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._drain_seconds = 0.0

    @property
    def has_gpus(self) -> bool:
        """Return whether a node has a GPU."""
        return bool(ray.cluster_resources().get("GPU"))

    def __enter__(self) -> Cluster:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = {"logging_level": logging.ERROR, "configure_logging": True}
        try:
            if self._address is None:
                ray.init("local", include_dashboard=False, **quiet)
            else:
                host, _, port = self._address.rpartition(":")
                if host:  # Ray itself would try for minutes
                    socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                ray.init(self._address, **quiet)
        except (OSError, RayError, ValueError) as error:
            raise UserError(f"--ray-address: {one_line(error)}") from error
        return self

    def start(self, settings: Settings, *, host: str, port: int, api_key: str | None) -> None:
        """Start the replicas, and wait until they are ready.

        Raises:
            UserError: This machine has too few CPUs or GPUs, or the model does not load.
        """
        if self._address is None:  # another cluster may add nodes
            found = ray.cluster_resources()
            cpus, gpus = settings.tensor_parallel, settings.gpus_per_replica
            needed = {"CPU": settings.replicas * cpus, "GPU": settings.replicas * gpus}
            for kind, count in needed.items():
                if count > found.get(kind, 0):
                    raise UserError(
                        f"--replicas: {settings.replicas} need {count:g} {kind}s, and Ray finds {found.get(kind, 0):g} "
                        "here; give fewer --replicas, or less --tensor-parallel or --gpus-per-replica"
                    )
        serve.start(
            http_options={"host": host, "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        self._drain_seconds = settings.drain_seconds
        try:
            self._gateway = serve.run(make_application(settings, api_key), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            message = serve.status().applications[APPLICATION].deployments[Model.__name__].message
            *_, reason = [one_line(error), *filter(None, message.splitlines())]  # the last line of a traceback
            raise UserError(f"the replicas did not start: {reason.strip()}") from error

    def wait(self) -> None:
        """Wait until this process is interrupted. Then wait for open requests.

        Raises:
            UserError: The application ended by itself.
        """
        try:
            while APPLICATION in serve.status().applications:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # how a server is stopped
            self._drain()
        else:
            raise UserError("the application was deleted from the cluster")

    def _drain(self) -> None:
        try:
            limit = self._drain_seconds + 2 * CANCEL_SECONDS
            self._gateway.drain.remote(self._drain_seconds).result(timeout_s=limit)
        except (RayError, RayServeException, TimeoutError) as failure:
            log.warning("open requests were cut off: %s", one_line(failure))

    def __exit__(self, *_: object) -> None:
        if self._address is None:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()
