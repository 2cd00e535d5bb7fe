"""The training API under the path that its document names: `uvicorn services.training_api.app:app`.

The gateway itself is `unified_gateway`; its options come from the environment (`UNIFIED_MASTER`,
`TRAINER_API_TOKEN`, …). Without `UNIFIED_MASTER` it starts a cluster of this host, for as long as it runs.
"""

from unified_gateway.app import app

__all__ = ["app"]
