"""Settings of a deployment on Ray Serve: the ``args`` of its application in ``serve_config.yaml``."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from dma_eval.names import API_KEY_VARIABLE

APPLICATION = "dma-hf"
IMPORT_PATH = "dma_eval.serving.replicas:build_application"
HEADER = f"""\
# Run it with:  serve run FILE  (on this machine), or  serve deploy FILE  (on a cluster whose nodes have dma-hf).
# "args" are the options of dma-hf serve; their meaning is in `dma-hf serve --help`.
# Options of Ray Serve itself go into "deployments", by the names Model and Gateway, and take precedence.
# The API key is not stored here: set {API_KEY_VARIABLE} on the nodes.
"""


class Settings(BaseModel):
    """The model, the number of replicas, and their options."""

    model_config = ConfigDict(extra="forbid")

    model: str
    attn: str = "dma_mxfp"
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    yarn: float | None = None
    seed: int = 0
    continuous_batching: bool = False
    cache_gib: float | None = None
    compile: bool = False
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = None
    gpus_per_replica: float = Field(1, ge=0)
    tensor_parallel: int = Field(1, ge=1)
    max_requests: int = Field(64, ge=1)
    max_queued: int = Field(64, ge=1)
    session_affinity: bool = False
    drain_seconds: float = Field(10, ge=0)
    log_level: str = "info"

    @property
    def gpus_per_rank(self) -> float:
        """Return the GPUs of one process of a replica."""
        return self.gpus_per_replica / self.tensor_parallel


def write_config(settings: Settings, path: Path, *, host: str, port: int) -> None:
    """Write the file for ``serve run`` and ``serve deploy``."""
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": settings.model_dump(exclude_none=True),
    }
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [application],
    }
    path.write_text(HEADER + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
