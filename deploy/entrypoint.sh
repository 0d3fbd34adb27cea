#!/bin/sh
# `serve [OPTIONS]` serves the artifact mounted at $NXD_ARTIFACT (SageMaker mounts it at /opt/ml/model);
# anything else is passed to nxd-infer as it is.
set -eu
if [ "${1:-serve}" = "serve" ]; then
    shift || true
    exec nxd-infer serve "${NXD_ARTIFACT:-/opt/ml/model}" --host 0.0.0.0 --port "${PORT:-8080}" "$@"
fi
exec nxd-infer "$@"
